"""Writes the Kubernetes manifest of a job: a JobSet of one replicated job per pool of nodes.

Each pod is a node and runs the node's agent (node.py) over the records, which a ConfigMap holds.
The Secret of the job's name, which the user makes, holds MEGARL_JOB_TOKEN and other secrets.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megarl.config.errors import ConfigError
from megarl.launcher.job import Job

API = "jobset.x-k8s.io/v1alpha2"
RECORDS = "/etc/megarl"
LONGEST = 63  # characters of a pod's name
_ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"


class _Block(str):
    """Is written as it stands, line by line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def jobset(job: Job, stamp: str) -> str:
    """Returns the manifest as YAML. stamp: a number that grows from manifest to manifest, which
    tells their attempts apart. Raises ConfigError for a name that Kubernetes does not take."""
    name = _name(job)
    records = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"job.json": _Block(job.to_json())},
    }
    pools = list(dict.fromkeys(job.pools))
    manifest = {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": job.restarts},
            "replicatedJobs": [_replicated(job, name, pool, stamp) for pool in pools],
        },
    }
    return yaml.dump_all([records, manifest], Dumper=_Dumper, sort_keys=False, width=10_000)


def _name(job: Job) -> str:
    """Returns the job's name as Kubernetes takes it: pods are called <name>-<pool>-0-<node>-<five
    letters>."""
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    room = LONGEST - max(len(f"-{pool}-0-{len(job.pools)}-xxxxx") for pool in job.pools)
    if not name[:1].isalpha() or len(name) > room:
        raise ConfigError(
            [
                f"experiment_name and trial_name: a JobSet would be called {name!r}, which must "
                f"begin with a letter and have at most {room} characters; choose others"
            ]
        )
    return name


def _replicated(job: Job, name: str, pool: str, stamp: str) -> dict[str, Any]:
    nodes = [n for n, p in enumerate(job.pools) if p == pool]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.grace) + 30,
        "containers": [_container(job, name, nodes[0], stamp)],
        "volumes": [
            {"name": "records", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *({"name": name, "hostPath": {"path": here}} for name, here, _ in _mounts(job)),
        ],
    }
    return {
        "name": pool,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": len(nodes),
                "completions": len(nodes),
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": {"spec": pod},
            }
        },
    }


def _mounts(job: Job) -> list[tuple[str, str, str]]:
    """Returns the name, the directory of the host and that of the container, of each mount."""
    mounts = enumerate(job.container_mounts)
    return [(f"mount-{i}", m.split(":")[0], (m.split(":") * 2)[1]) for i, m in mounts]


def _container(job: Job, name: str, first: int, stamp: str) -> dict[str, Any]:
    gpus = job.gpus_per_node[first]
    agent = [
        *(job.python, "-m", "megarl.launcher.node", "--job", f"{RECORDS}/job.json"),
        *("--node-variable", "JOB_COMPLETION_INDEX", "--first-node", str(first)),
        *("--attempt", f"{stamp}.$(JOB_ATTEMPT)"),
    ]
    return {
        "name": "node",
        "image": job.container,
        "command": agent,
        "workingDir": job.working_directory,
        "env": [
            {"name": "JOB_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": _ATTEMPT}}},
        ],
        "envFrom": [{"secretRef": {"name": name}}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}} if gpus else {},
        "volumeMounts": [
            {"name": "records", "mountPath": RECORDS},
            # a pod's own has 64 MiB, too little for NCCL
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": name, "mountPath": there} for name, _, there in _mounts(job)),
        ],
    }
