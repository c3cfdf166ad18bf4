// Stands in for the kernel's files of GPUs: what a program opens or lists below these folders comes
// from the tree that KERNEL_STANDIN names. Loaded by LD_PRELOAD.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const folders[] = {"/sys/bus/pci/drivers", "/sys/class/kfd", "/dev/dri"};

static const char *standin(const char *path, char *buffer) {
    const char *tree = getenv("KERNEL_STANDIN");
    for (size_t i = 0; tree && path && i < sizeof folders / sizeof *folders; i++) {
        if (!strncmp(path, folders[i], strlen(folders[i]))) {
            snprintf(buffer, PATH_MAX, "%s%s", tree, path);
            return buffer;
        }
    }
    return path;
}

static int opened(const char *name, const char *path, int flags, int mode) {
    char buffer[PATH_MAX];
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    return real(standin(path, buffer), flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    return opened("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    return opened("open64", path, flags, mode);
}

DIR *opendir(const char *path) {
    char buffer[PATH_MAX];
    DIR *(*real)(const char *) = dlsym(RTLD_NEXT, "opendir");
    return real(standin(path, buffer));
}
