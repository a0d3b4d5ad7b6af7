"""Metrics in Prometheus' text form, as Prometheus' own parser reads them, and who may read them."""

from __future__ import annotations

import http.client
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.config.errors import ConfigError
from megarl.config.run import StatsLoggerConfig
from megarl.observability.prometheus import exposition
from megarl.observability.stats_logger import StatsLogger
from megarl.utils.env import JOB_TOKEN, free_port

TOKEN = "the-token"


def parsed(page: str) -> dict[str, tuple[str, float]]:
    """The type and value of every sample. No sample has a label."""
    samples = {}
    for family in text_string_to_metric_families(page):
        (sample,) = family.samples
        assert not sample.labels and family.documentation
        samples[sample.name] = family.type, sample.value
    return samples


def test_what_counts_from_the_begin_is_a_counter_and_all_else_a_gauge() -> None:
    page = exposition(
        {
            "steps": 7,
            "reward/mean": 0.5,
            "rollout/submitted": 24.0,
            "rollout/skipped_samples": 2.0,
            "rollout/failed_samples/reward": 1.0,
            "rollout/failed_samples/len_mean": 6.5,
            "rollout/pending": 3.0,
            "eval/my set/pass@4": 1.0,
            "kl": math.inf,
            "loss": math.nan,
            "grad": -math.inf,
        }
    )
    samples = parsed(page)
    assert math.isnan(samples.pop("megarl_loss")[1])
    assert samples == {
        "megarl_steps_total": ("counter", 7.0),
        "megarl_reward_mean": ("gauge", 0.5),
        "megarl_rollout_submitted_total": ("counter", 24.0),
        "megarl_rollout_skipped_samples_total": ("counter", 2.0),
        "megarl_rollout_failed_samples_reward_total": ("counter", 1.0),
        "megarl_rollout_failed_samples_len_mean": ("gauge", 6.5),
        "megarl_rollout_pending": ("gauge", 3.0),
        "megarl_eval_my_set_pass_4": ("gauge", 1.0),
        "megarl_kl": ("gauge", math.inf),
        "megarl_grad": ("gauge", -math.inf),
    }
    assert "megarl_kl +Inf\n" in page and "megarl_loss NaN\n" in page  # as the format spells them


def test_no_name_breaks_the_page() -> None:
    """Neither one that is no name of Prometheus', nor two that are the same one there."""
    page = exposition({'a\nb\\c{d="e"} 1': 1.0, "x/y": 1.0, "x_y": 2.0, "größe": 3.0})
    assert {name: value for name, (_, value) in parsed(page).items()} == {
        "megarl_a_b_c_d__e___1": 1.0,
        "megarl_x_y": 2.0,
        "megarl_gr__e": 3.0,
    }


def logger(run: Path, port: int, **more: Any) -> StatsLogger:
    return StatsLogger(
        StatsLoggerConfig(metrics_port=port, report=False),
        run_dir=run, experiment_name="e", trial_name="t", run_config={}, **more,
    )  # fmt: skip


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv(JOB_TOKEN, TOKEN)
    yield free_port("127.0.0.1")


def test_a_run_serves_the_newest_value_of_every_metric(tmp_path: Path, port: int) -> None:
    known = {"Authorization": f"Bearer {TOKEN}"}
    run = logger(tmp_path, port, from_step=4)
    try:
        assert parsed(get(port, **known)[1])["megarl_steps_total"] == ("counter", 4.0)
        run.log(5, {"eval/accuracy": 0.25, "reward/mean": 0.5})
        run.log(6, {"reward/mean": 0.75})
        status, page = get(port, **known)
        samples = parsed(page)
        assert status == 200 and samples.pop("megarl_last_step_timestamp_seconds")[1] > 1.7e9
        assert samples == {
            "megarl_steps_total": ("counter", 6.0),
            "megarl_eval_accuracy": ("gauge", 0.25),  # of the last evaluation
            "megarl_reward_mean": ("gauge", 0.75),
        }
        assert get(port, "/", **known) == (404, "")
    finally:
        run.close()
    with pytest.raises(ConnectionRefusedError):
        get(port, **known)


def test_nobody_reads_without_the_token(tmp_path: Path, port: int) -> None:
    run = logger(tmp_path, port)
    try:
        run.log(1, {"loss": 0.5})
        for given in ("", TOKEN, "Bearer ", "Bearer x", f"Basic {TOKEN}", "Bearer ä"):
            headers = {"Authorization": given} if given else {}
            assert get(port, **headers) == get(port, "/", **headers) == (401, "")
    finally:
        run.close()


def test_it_listens_on_loopback_alone(tmp_path: Path, port: int) -> None:
    run = logger(tmp_path, port)
    try:
        with socket.socket() as other:  # another address of this machine is free for others
            other.bind(("127.0.0.2", port))
    finally:
        run.close()


def test_a_port_that_cannot_be_served_is_named(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"stats_logger.metrics_port={port}: .*another port"):
            logger(tmp_path, port)
    monkeypatch.delenv(JOB_TOKEN)
    with pytest.raises(ConfigError, match=rf"stats_logger.metrics_port={port}: .*{JOB_TOKEN}"):
        logger(tmp_path, port)
