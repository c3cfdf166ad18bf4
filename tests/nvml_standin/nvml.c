/* Stands in for libnvidia-ml.so.1: answers from a text file, with the real names and layouts.
 *
 * The file, named by NVML_STANDIN, has a line "key value" for each number or word; it is read again
 * whenever it has been replaced. "3.power_mw" is of board 3. A key that is not there is what
 * that board does not support, and a value "!15" is the error 15. tests/nvml_boards.py writes it.
 * Like NVML's real callers here, one thread at a time.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25
};
#define ALL_LINKS 0xFFFFFFFFu

typedef unsigned int u32;
typedef unsigned long long u64;
typedef uintptr_t Device; /* generation << 16 | board */

static int users;

/* --- the file ------------------------------------------------------------------------------ */

static char *text;
static struct { char *key, *value; } *lines;
static int line_count;
static struct stat seen;

static void look(void) {
    const char *path = getenv("NVML_STANDIN");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (text && now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    fstat(fileno(file), &seen);
    free(text);
    free(lines);
    text = calloc(1, (size_t)seen.st_size + 1);
    size_t length = fread(text, 1, (size_t)seen.st_size, file);
    fclose(file);
    int most = 1;
    for (size_t i = 0; i < length; i++) most += text[i] == '\n';
    lines = calloc((size_t)most, sizeof *lines);
    line_count = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        char *space = strchr(line, ' ');
        if (!space) continue;
        *space = 0;
        lines[line_count].key = line;
        lines[line_count++].value = space + 1;
    }
}

static const char *find(const char *key) {
    for (int i = 0; i < line_count; i++)
        if (!strcmp(lines[i].key, key)) return lines[i].value;
    return NULL;
}

static int refusal(const char *value) {
    if (!value) return NOT_SUPPORTED;
    return value[0] == '!' ? atoi(value + 1) : SUCCESS;
}

static long long number(const char *key, long long otherwise) {
    const char *value = find(key);
    return value && value[0] != '!' ? strtoll(value, NULL, 0) : otherwise;
}

/* --- devices ------------------------------------------------------------------------------- */

static Device device(int board) {
    return (Device)number("generation", 1) << 16 | (Device)board;
}

static void full_key(char *into, size_t size, Device of, const char *key) {
    snprintf(into, size, "%d.%s", (int)(of & 0xFFFF), key);
}

/* A board that was lost appears only to a library that is opened anew. */
static int gone[64];

static int alive(Device of) {
    look();
    if (!users) return UNINITIALIZED;
    if (number("loaded", 1) == 0) return DRIVER_NOT_LOADED;
    if ((long long)(of >> 16) != number("generation", 1)) return INVALID_ARGUMENT;
    char key[64];
    snprintf(key, sizeof key, "%d.hang", (int)(of & 0xFFFF));
    while (number(key, 0)) {
        usleep(5000);
        look();
    }
    snprintf(key, sizeof key, "%d.lost", (int)(of & 0xFFFF));
    if (number(key, 0)) gone[of & 0xFFFF] = 1;
    return gone[of & 0xFFFF] ? GPU_IS_LOST : SUCCESS;
}

static int ask(Device of, const char *key, const char **value) {
    int code = alive(of);
    if (code) return code;
    char full[128];
    full_key(full, sizeof full, of, key);
    *value = find(full);
    return refusal(*value);
}

static int ask_u64(Device of, const char *key, u64 *into) {
    const char *value;
    int code = ask(of, key, &value);
    if (!code) *into = (u64)strtoull(value, NULL, 0);
    return code;
}

static int ask_u32(Device of, const char *key, u32 *into) {
    u64 wide;
    int code = ask_u64(of, key, &wide);
    if (!code) *into = (u32)wide;
    return code;
}

static int ask_text(Device of, const char *key, char *into, u32 size) {
    const char *value;
    int code = ask(of, key, &value);
    if (code) return code;
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(into, value);
    return SUCCESS;
}

/* --- the whole ----------------------------------------------------------------------------- */

int nvmlInitWithFlags(u32 flags) {
    (void)flags;
    look();
    while (number("hang", 0)) {
        usleep(5000);
        look();
    }
    int code = (int)number("init", 0);
    if (!code && number("loaded", 1) == 0) code = DRIVER_NOT_LOADED;
    if (!code && !users++) memset(gone, 0, sizeof gone);
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char said[32];
    snprintf(said, sizeof said, "stand-in error %d", code);
    return said;
}

int nvmlSystemGetDriverVersion(char *into, u32 size) {
    look();
    if (!users) return UNINITIALIZED;
    const char *value = find("driver");
    if (refusal(value)) return refusal(value);
    snprintf(into, size, "%s", value);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(u32 *count) {
    look();
    if (!users) return UNINITIALIZED;
    if (number("loaded", 1) == 0) return DRIVER_NOT_LOADED;
    *count = (u32)number("count", 0);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, Device *into) {
    u32 count = 0;
    int code = nvmlDeviceGetCount_v2(&count);
    if (code) return code;
    if (index >= count) return INVALID_ARGUMENT;
    *into = device((int)index);
    return alive(*into);
}

/* --- one number, one function --------------------------------------------------------------- */

int nvmlDeviceGetUUID(Device of, char *into, u32 size) {
    return ask_text(of, "uuid", into, size);
}

int nvmlDeviceGetName(Device of, char *into, u32 size) {
    return ask_text(of, "name", into, size);
}

#define U32(function, key) \
    int function(Device of, u32 *into) { return ask_u32(of, key, into); }
#define U64(function, key) \
    int function(Device of, u64 *into) { return ask_u64(of, key, into); }
U32(nvmlDeviceGetPowerUsage, "power_mw")
U32(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
U32(nvmlDeviceGetPcieReplayCounter, "replays")
U32(nvmlDeviceGetCurrPcieLinkWidth, "link.width.current")
U32(nvmlDeviceGetMaxPcieLinkWidth, "link.width.max")
U64(nvmlDeviceGetTotalEnergyConsumption, "energy_mj")
U64(nvmlDeviceGetCurrentClocksEventReasons, "event_reasons")
U64(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle_reasons")

int nvmlDeviceGetTemperature(Device of, u32 sensor, u32 *into) {
    return sensor ? INVALID_ARGUMENT : ask_u32(of, "temperature", into);
}

typedef struct { u32 version, sensor; int celsius; } Temperature;
int nvmlDeviceGetTemperatureV(Device of, Temperature *into) {
    if (into->version != (sizeof *into | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return into->sensor ? INVALID_ARGUMENT : ask_u32(of, "temperature_v", (u32 *)&into->celsius);
}

#define NUMBERED(function, name) \
    int function(Device of, u32 which, u32 *into) { \
        char key[48]; \
        snprintf(key, sizeof key, name ".%u", which); \
        return ask_u32(of, key, into); \
    }
NUMBERED(nvmlDeviceGetClockInfo, "clock_mhz")

int nvmlDeviceGetTotalEccErrors(Device of, u32 kind, u32 counter, u64 *into) {
    char key[48];
    snprintf(key, sizeof key, "ecc.%u.%u", kind, counter);
    return ask_u64(of, key, into);
}

typedef struct { u32 gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device of, Utilization *into) {
    int code = ask_u32(of, "utilization.gpu", &into->gpu);
    return code ? code : ask_u32(of, "utilization.memory", &into->memory);
}

#define CODEC(function, key) \
    int function(Device of, u32 *into, u32 *period_us) { \
        *period_us = 1000000; \
        return ask_u32(of, key, into); \
    }
CODEC(nvmlDeviceGetEncoderUtilization, "utilization.encoder")
CODEC(nvmlDeviceGetDecoderUtilization, "utilization.decoder")

int nvmlDeviceGetRemappedRows(Device of, u32 *corrected, u32 *uncorrected, u32 *pending,
                                     u32 *failed) {
    *pending = *failed = 0;
    int code = ask_u32(of, "remapped.corrected", corrected);
    return code ? code : ask_u32(of, "remapped.uncorrected", uncorrected);
}

typedef struct {
    char legacy[16];
    u32 domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;
int nvmlDeviceGetPciInfo_v3(Device of, Pci *into) {
    memset(into, 0, sizeof *into);
    return ask_text(of, "pci", into->bus_id, sizeof into->bus_id);
}

typedef struct { u64 total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device of, Memory *into) {
    u64 reserved = 0;
    int code = ask_u64(of, "memory.total", &into->total);
    if (!code) code = ask_u64(of, "memory.used", &into->used);
    if (!code && !ask_u64(of, "memory.reserved", &reserved)) into->used += reserved;
    into->free = into->total - into->used;
    return code;
}

typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;
int nvmlDeviceGetMemoryInfo_v2(Device of, Memory2 *into) {
    if (into->version != (sizeof(Memory2) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    int code = ask_u64(of, "memory.reserved", &into->reserved);
    if (!code) code = ask_u64(of, "memory.total", &into->total);
    if (!code) code = ask_u64(of, "memory.used", &into->used);
    into->free = into->total - into->used - into->reserved;
    return code;
}

/* --- fields: "field.<number>" or "field.<number>.<link>", with the value's type before it ----- */

typedef struct {
    u32 field, scope;
    int64_t timestamp, latency;
    int type, code;
    union { double d; u32 u; u64 ull; int64_t sll; int32_t si; uint16_t us; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Device of, int count, FieldValue *values) {
    int code = alive(of);
    if (code) return code;
    for (int i = 0; i < count; i++) {
        FieldValue *each = &values[i];
        char key[48];
        const char *said;
        if (each->scope == ALL_LINKS) snprintf(key, sizeof key, "field.%u.all", each->field);
        else if (each->scope) snprintf(key, sizeof key, "field.%u.%u", each->field, each->scope);
        else snprintf(key, sizeof key, "field.%u", each->field);
        each->code = ask(of, key, &said);
        each->value.ull = 0;
        if (each->code) continue;
        char *rest;
        each->type = (int)strtol(said, &rest, 10);
        if (each->type == 1) each->value.u = (u32)strtoull(rest, NULL, 0);
        else each->value.ull = strtoull(rest, NULL, 0);
    }
    return SUCCESS;
}

/* --- processes: "compute 4711:1048576 4712:-", a dash where the memory is not known ---------- */

typedef struct { u32 pid; u64 used; u32 gi, ci; } Process;

static int processes(Device of, const char *key, u32 *count, Process *into) {
    const char *said;
    int code = ask(of, key, &said);
    if (code) return code;
    u32 room = *count, found = 0;
    char *copy = strdup(said);
    for (char *each = strtok(copy, " "); each; each = strtok(NULL, " ")) {
        char *colon = strchr(each, ':');
        if (!colon) continue;
        if (into && found < room) {
            into[found].pid = (u32)strtoul(each, NULL, 10);
            into[found].used = colon[1] == '-' ? ~0ULL : strtoull(colon + 1, NULL, 10);
            into[found].gi = into[found].ci = ALL_LINKS;
        }
        found++;
    }
    free(copy);
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(kind, name) \
    int nvmlDeviceGet##kind##RunningProcesses_v3(Device of, u32 *count, Process *into) { \
        return processes(of, name, count, into); \
    }
PROCESSES(Compute, "compute")
PROCESSES(Graphics, "graphics")
PROCESSES(MPSCompute, "mps")

/* --- events: "xids 31 79" grows; a set tells what came after the board was registered in it ---- */

static int held;
/* How often it is open, and how many sets of events and samples were not given back. */
int standin_open(void) { return users; }
int standin_held(void) { return held; }

typedef struct { Device device; u64 type, data; u32 gi, ci; } Event;
typedef struct { Device of; int told; } EventSet;

static int xid(Device of, int which, u64 *code) {
    char key[64];
    full_key(key, sizeof key, of, "xids");
    const char *at = find(key);
    int count = 0;
    while (at && *at) {
        char *end;
        u64 value = strtoull(at, &end, 10);
        if (end == at) break;
        if (count++ == which) *code = value;
        at = end;
    }
    return count;
}

int nvmlEventSetCreate(EventSet **into) {
    if (!users) return UNINITIALIZED;
    *into = calloc(1, sizeof **into);
    held++;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device of, u64 types, EventSet *set) {
    const char *said;
    int code = ask(of, "xids", &said);
    if (code) return code;
    if (types != 8) return INVALID_ARGUMENT;
    set->of = of;
    set->told = xid(of, -1, NULL);
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, Event *into, u32 timeout_ms) {
    if (!users) return UNINITIALIZED;
    look();
    u64 code = 0;
    if (xid(set->of, set->told, &code) > set->told) {
        set->told++;
        memset(into, 0, sizeof *into);
        into->device = set->of;
        into->type = 8;
        into->data = code;
        return SUCCESS;
    }
    int state = alive(set->of);
    if (state) return state;
    return timeout_ms ? INVALID_ARGUMENT : TIMEOUT; /* the agent never waits */
}

int nvmlEventSetFree(EventSet *set) {
    free(set);
    held--;
    return users ? SUCCESS : UNINITIALIZED;
}

/* --- GPM: "gpm.<metric>" is what any two samples of a device tell ---------------------------- */

typedef struct { Device of; } Sample;
typedef struct { u32 id; int code; double value; const char *names[3]; } Metric;
typedef struct { u32 version, count; Sample *first, *second; Metric metrics[]; } Metrics;
typedef struct { u32 version, supported; } Support;

int nvmlGpmQueryDeviceSupport(Device of, Support *into) {
    if (into->version != 1) return ARGUMENT_VERSION_MISMATCH;
    return ask_u32(of, "gpm", &into->supported);
}

int nvmlGpmSampleAlloc(Sample **into) {
    *into = calloc(1, sizeof **into);
    held++;
    return SUCCESS;
}

int nvmlGpmSampleFree(Sample *sample) {
    free(sample);
    held--;
    return SUCCESS;
}

int nvmlGpmSampleGet(Device of, Sample *into) {
    u32 supported;
    int code = ask_u32(of, "gpm", &supported);
    into->of = of;
    return code;
}

int nvmlGpmMetricsGet(Metrics *asked) {
    if (asked->version != 1) return ARGUMENT_VERSION_MISMATCH;
    if (!asked->first || !asked->second || !asked->first->of || !asked->second->of ||
        asked->first == asked->second)
        return INVALID_ARGUMENT;
    for (u32 i = 0; i < asked->count; i++) {
        char key[48];
        const char *said;
        snprintf(key, sizeof key, "gpm.%u", asked->metrics[i].id);
        asked->metrics[i].code = ask(asked->second->of, key, &said);
        if (!asked->metrics[i].code) asked->metrics[i].value = strtod(said, NULL);
    }
    return SUCCESS;
}
