"""The names users write queries against do not change by accident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.metrics_page import metrics_page

from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import BY_NAME, METRICS, Kind, Metric
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, PHASES, STATES, VERDICTS

DOCS = Path(__file__).parents[1] / "docs"

PROMETHEUS_NAMES = {
    # Run
    "training.run.info": "training_run_info",
    "training.run.setting": "training_run_setting",
    "training.run.start.timestamp": "training_run_start_timestamp_seconds",
    "training.parameters": "training_parameters",
    # Progress and state
    "training.state": "training_state",
    "training.world.size": "training_world_size",
    "training.phase": "training_phase",
    "training.step": "training_step",
    "training.epoch": "training_epoch",
    "training.heartbeat.timestamp": "training_heartbeat_timestamp_seconds",
    "training.progress.timestamp": "training_progress_timestamp_seconds",
    "training.stall.timeout": "training_stall_timeout_seconds",
    "training.stalled": "training_stalled",
    "training.early_stop.step": "training_early_stop_step",
    "training.restarts": "training_restarts_total",
    "training.exceptions": "training_exceptions_total",
    "training.ooms": "training_ooms_total",
    "training.checkpoint.duration": "training_checkpoint_duration_seconds",
    "training.checkpoint.timestamp": "training_checkpoint_timestamp_seconds",
    # Speed
    "training.steps": "training_steps_total",
    "training.samples": "training_samples_total",
    "training.tokens": "training_tokens_total",
    "training.micro_batches": "training_micro_batches_total",
    "training.steps.skipped": "training_steps_skipped_total",
    "training.set.size": "training_set_size",
    "training.set.batches": "training_set_batches",
    "training.set.rank_samples": "training_set_rank_samples",
    "training.epoch.samples": "training_epoch_samples",
    "training.step.duration": "training_step_duration_seconds",
    "training.phase.time": "training_phase_time_seconds_total",
    "training.phase.step_time": "training_phase_step_time_seconds",
    "training.gc.time": "training_gc_time_seconds_total",
    "training.flops": "training_flops_total",
    "training.flops.peak": "training_flops_peak_per_second",
    "training.cuda.memory.allocated": "training_cuda_memory_allocated_bytes",
    "training.cuda.memory.reserved": "training_cuda_memory_reserved_bytes",
    "training.cuda.memory.peak": "training_cuda_memory_peak_bytes",
    "training.cuda.alloc_retries": "training_cuda_alloc_retries_total",
    # Learning
    "training.scalar": "training_scalar",
    "training.scalar.step": "training_scalar_step",
    "training.scalar.epoch": "training_scalar_epoch",
    "training.nonfinite": "training_nonfinite_total",
    # Summary
    "training.scalar.best": "training_scalar_best",
    "training.scalar.best.step": "training_scalar_best_step",
    # Artifacts
    "training.artifact.timestamp": "training_artifact_timestamp_seconds",
    "training.artifact.size": "training_artifact_size_bytes",
    "training.artifact.step": "training_artifact_step",
    # Diagnosis
    "training.straggler": "training_straggler",
    "training.straggler.excess": "training_straggler_excess_ratio",
    "training.imbalance": "training_imbalance",
    "training.recurring_stall": "training_recurring_stall",
    "training.straggler.lost_time": "training_straggler_lost_time_seconds_total",
    "training.node.work.max": "training_node_work_max_seconds",
    "training.node.work.median": "training_node_work_median_seconds",
    "training.own_collectives": "training_own_collectives",
    "training.stall.reason": "training_stall_reason",
    "training.collective.enqueued": "training_collective_enqueued",
    "training.collective.completed": "training_collective_completed",
    # Process
    "process.cpu.time": "process_cpu_time_seconds_total",
    "process.memory.usage": "process_memory_usage_bytes",
    "process.memory.virtual": "process_memory_virtual_bytes",
    "process.thread.count": "process_thread_count",
    "process.unix.file_descriptor.count": "process_unix_file_descriptor_count",
    "process.disk.io": "process_disk_io_bytes_total",
    "process.context_switches": "process_context_switches_total",
    "process.uptime": "process_uptime_seconds",
    "training.children.count": "training_children_count",
    "training.children.cpu.time": "training_children_cpu_time_seconds_total",
    "training.children.memory.usage": "training_children_memory_usage_bytes",
    "training.children.disk.io": "training_children_disk_io_bytes_total",
    # GPU
    "hw.gpu.utilization": "hw_gpu_utilization_ratio",
    "otel_ddp.gpu.mem_controller.utilization": "otel_ddp_gpu_mem_controller_utilization_ratio",
    "hw.gpu.memory.usage": "hw_gpu_memory_usage_bytes",
    "hw.gpu.memory.limit": "hw_gpu_memory_limit_bytes",
    "hw.power": "hw_power_watts",
    "otel_ddp.gpu.power.limit": "otel_ddp_gpu_power_limit_watts",
    "hw.energy": "hw_energy_joules_total",
    "hw.temperature": "hw_temperature_celsius",
    "hw.fan.speed_ratio": "hw_fan_speed_ratio",
    "otel_ddp.gpu.clock.frequency": "otel_ddp_gpu_clock_frequency_hertz",
    "otel_ddp.gpu.throttle.active": "otel_ddp_gpu_throttle_active",
    "otel_ddp.gpu.throttle.duration": "otel_ddp_gpu_throttle_duration_seconds_total",
    "hw.gpu.io": "hw_gpu_io_bytes_total",
    "otel_ddp.gpu.pcie.link.generation": "otel_ddp_gpu_pcie_link_generation",
    "otel_ddp.gpu.pcie.link.width": "otel_ddp_gpu_pcie_link_width",
    "otel_ddp.gpu.nvlink.io": "otel_ddp_gpu_nvlink_io_bytes_total",
    "otel_ddp.gpu.nvlink.errors": "otel_ddp_gpu_nvlink_errors_total",
    "otel_ddp.gpu.pcie.replays": "otel_ddp_gpu_pcie_replays_total",
    "hw.errors": "hw_errors_total",
    "otel_ddp.gpu.xid.errors": "otel_ddp_gpu_xid_errors_total",
    "otel_ddp.gpu.remapped_rows": "otel_ddp_gpu_remapped_rows_total",
    "otel_ddp.gpu.engine.active": "otel_ddp_gpu_engine_active_ratio",
    "otel_ddp.gpu.process.memory.usage": "otel_ddp_gpu_process_memory_usage_bytes",
    # Host
    "system.cpu.utilization": "system_cpu_utilization_ratio",
    "otel_ddp.host.load_average.1m": "otel_ddp_host_load_average_1m",
    "system.memory.usage": "system_memory_usage_bytes",
    "system.memory.limit": "system_memory_limit_bytes",
    "system.paging.usage": "system_paging_usage_bytes",
    "system.disk.io": "system_disk_io_bytes_total",
    "system.filesystem.usage": "system_filesystem_usage_bytes",
    "system.network.io": "system_network_io_bytes_total",
    "system.network.errors": "system_network_errors_total",
    "hw.network.io": "hw_network_io_bytes_total",
    "otel_ddp.host.pressure": "otel_ddp_host_pressure_seconds_total",
    # Ourselves
    "otel_ddp.records.lost": "otel_ddp_records_lost_total",
    "otel_ddp.values.refused": "otel_ddp_values_refused_total",
    "otel_ddp.points.dropped": "otel_ddp_points_dropped_total",
    "otel_ddp.exports": "otel_ddp_exports_total",
    "otel_ddp.spool.size": "otel_ddp_spool_size_bytes",
    "otel_ddp.artifacts": "otel_ddp_artifacts_total",
    "otel_ddp.artifacts.waiting": "otel_ddp_artifacts_waiting",
    "otel_ddp.hook.time": "otel_ddp_hook_time_seconds_total",
    "otel_ddp.hook.errors": "otel_ddp_hook_errors_total",
    "otel_ddp.agent.cpu.time": "otel_ddp_agent_cpu_time_seconds_total",
    "otel_ddp.source.age": "otel_ddp_source_age_seconds",
    "otel_ddp.source.errors": "otel_ddp_source_errors_total",
    "otel_ddp.capability": "otel_ddp_capability",
}

every_metric = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def test_every_metric_has_the_prometheus_name_that_dashboards_use() -> None:
    names = {metric.name: metric.prometheus for metric in METRICS}

    assert names == PROMETHEUS_NAMES


def test_metrics_stand_in_the_order_of_the_documentation() -> None:
    assert list(PROMETHEUS_NAMES) == [metric.name for metric in METRICS]
    assert list(PROMETHEUS_NAMES) == list(BY_NAME)


def test_no_two_metrics_share_a_name_in_opentelemetry_or_in_prometheus() -> None:
    assert len(METRICS) == len({metric.name for metric in METRICS})
    assert len(METRICS) == len({metric.prometheus for metric in METRICS})


def test_no_histogram_series_is_mistaken_for_another_metric() -> None:
    expanded = {
        f"{metric.prometheus}{suffix}"
        for metric in METRICS
        if metric.kind is Kind.HISTOGRAM
        for suffix in ("_bucket", "_sum", "_count")
    }

    assert not expanded & {metric.prometheus for metric in METRICS}


@every_metric
def test_a_constant_is_called_like_its_metric(metric: Metric) -> None:
    assert getattr(catalog, _constant(metric)) is metric


@every_metric
def test_only_a_ratio_has_the_unit_one(metric: Metric) -> None:
    assert (metric.unit == "1") == metric.prometheus.endswith("_ratio")


@every_metric
def test_a_description_is_one_sentence(metric: Metric) -> None:
    assert metric.description.endswith(".")
    assert ". " not in metric.description
    assert not metric.description[0].islower()
    assert "|" not in metric.description
    assert "\n" not in metric.description


@every_metric
def test_attributes_become_distinct_labels_that_hide_none_of_ours(metric: Metric) -> None:
    labels = [catalog.prometheus_label(attribute) for attribute in metric.attributes]
    labels += catalog.LABELS[metric.labels]

    assert len(labels) == len(set(labels))
    # A histogram's buckets are told apart by this one.
    assert "le" not in labels


@every_metric
def test_bounds_belong_to_histograms_and_rise(metric: Metric) -> None:
    assert (metric.kind is Kind.HISTOGRAM) == bool(metric.bounds)
    assert list(metric.bounds) == sorted(set(metric.bounds))


# Who speaks of a metric without reporting it: the catalogue, and who only reads what is served.
_READERS = ("vocabulary/", "survey.py", "cli/", "demo/")


def test_all_that_stands_there_is_reported() -> None:
    package = Path(catalog.__file__).parents[1]
    used = {
        name
        for path in package.rglob("*.py")
        if not str(path.relative_to(package)).startswith(_READERS)
        for name in _constants(path.read_text())
    }

    assert {metric.name for metric in METRICS if _constant(metric) not in used} == set()


def _constants(source: str) -> set[str]:
    imported = re.findall(r"from otel_ddp\.vocabulary\.catalog import (\([^)]*\)|.*)", source)
    return {
        *re.findall(r"\bcatalog\.([A-Z][A-Z0-9_]+)", source),
        *re.findall(r"[A-Z][A-Z0-9_]+", " ".join(imported)),
    }


def _constant(metric: Metric) -> str:
    return metric.name.replace(".", "_").upper()


def test_phases_and_states_keep_their_codes() -> None:
    assert PHASES == {
        "other": 0,
        "data": 1,
        "forward": 2,
        "backward": 3,
        "comm_wait": 4,
        "optimizer": 5,
        "checkpoint": 6,
        "eval": 7,
        "compile": 8,
    }
    assert STATES == {
        "starting": 0,
        "running": 1,
        "finished": 2,
        "failed": 3,
        "killed": 4,
    }


@pytest.mark.parametrize(
    ("name", "kind", "unit", "expected"),
    [
        ("a.b", Kind.GAUGE, "", "a_b"),
        ("a__b..c", Kind.GAUGE, "", "a_b_c"),
        ("a.b", Kind.GAUGE, "By/s", "a_b_bytes_per_second"),
        ("a.b", Kind.GAUGE, "{token}/s", "a_b_per_second"),
        ("a.b", Kind.GAUGE, "1", "a_b_ratio"),
        ("a.ratio", Kind.GAUGE, "1", "a_ratio"),
        ("a.b", Kind.COUNTER, "1", "a_b_total"),
        ("a.b", Kind.UPDOWN, "1", "a_b"),
        ("a.seconds", Kind.GAUGE, "s", "a_seconds"),
        ("a.seconds.b", Kind.GAUGE, "s", "a_seconds_b"),
        ("a.seconds_since", Kind.GAUGE, "s", "a_seconds_since"),
        ("a.total.b", Kind.COUNTER, "s", "a_b_seconds_total"),
        ("a.b", Kind.HISTOGRAM, "s", "a_b_seconds"),
    ],
)
def test_a_prometheus_name_follows_the_rules_of_the_collector(
    name: str, kind: Kind, unit: str, expected: str
) -> None:
    assert expected == catalog.prometheus_name(name, kind, unit)


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("local_rank", "local_rank"),
        ("network.io.direction", "network_io_direction"),
        ("config_lr-max", "config_lr_max"),
        ("config_größe", "config_gr__e"),
        ("a:b", "a_b"),
        ("a__b", "a__b"),
        ("2nd", "key_2nd"),
        (".hidden", "key_hidden"),
        ("__name", "__name"),
        ("", "key_"),
        ("学", "key_"),
    ],
)
def test_a_label_follows_the_rules_of_the_otlp_receiver(attribute: str, expected: str) -> None:
    assert expected == catalog.prometheus_label(attribute)


def test_the_documentation_is_what_the_catalogue_says() -> None:
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")

    assert written == metrics_page(), "docs/metrics.md is out of date: run `make docs`."
    assert [each.name for each in METRICS if f"`{each.name}`" not in written] == []


def test_what_page_report_and_comparison_look_for_is_in_the_catalogue() -> None:
    package = Path(catalog.__file__).parents[1] / "history"
    known = {metric.name for metric in catalog.METRICS}
    known |= {label for metric in catalog.METRICS for label in metric.attributes}
    sources = [*package.rglob("*.py"), *package.rglob("*.js")]
    wanted = {
        word
        for path in sources
        for word in re.findall(r'"((?:hw|system|process)\.[\w.]+)"', path.read_text())
    }

    assert "hw.model" in wanted
    assert wanted - known == set()


def test_the_kinds_of_verdicts_end_with_the_harmless_ones() -> None:
    assert {*VERDICTS[-1:]} == HARMLESS_VERDICTS
