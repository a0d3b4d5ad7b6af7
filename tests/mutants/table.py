"""The faults, by room (see __main__.py)."""

from __future__ import annotations

from tests.mutants import Mutant

MUTANTS = (
    Mutant(
        "config/allocation.py",
        "return d * t * p * c",
        "return d * t * p",
        ("tests/unit/test_allocation.py::test_colons_any_order_and_colocation",),
    ),
    Mutant(
        "config/bounds.py",
        "and (self.le is None or value <= self.le)",
        "and (self.le is None or value < self.le)",
        ("tests/unit/test_config_check.py::test_a_sound_ppo_passes",),
    ),
    Mutant(
        "config/check_engine.py",
        "if cfg.overlap_param_gather and not cfg.overlap_grad_reduce:",
        "if False:",
        ("tests/unit/test_config_check.py::test_problem_is_named",),
    ),
    Mutant(
        "config/check_parallel.py",
        "if p.vpp > 1 and p.pp < 2:",
        "if p.vpp > 1 and p.pp < 1:",
        ("tests/unit/test_config_check.py::test_degrees_that_do_not_fit",),
    ),
    Mutant(
        "config/compose.py",
        "tree = merged(merged(tree, presets.below(own)), own)",
        "tree = merged(merged(tree, own), presets.below(own))",
        ("tests/unit/test_presets.py::test_keys_of_the_file_win_over_the_preset_it_names",),
    ),
    Mutant(
        "config/schema.py",
        "if cfg is None:",
        "if False:",
        ("tests/unit/test_config_check.py::test_a_sound_ppo_passes",),
    ),
    Mutant(
        "config/servers.py",
        'return [address for line in lines if (address := line.partition("#")[0].strip())]',
        "return [address for line in lines if (address := line.strip())]",
        ("tests/unit/test_timeline.py::test_presence",),
    ),
    Mutant(
        "launcher/job.py",
        "return [t for t in self.tasks if t.role == role and node in (None, t.node)]",
        "return [t for t in self.tasks if t.role == role]",
        ("tests/unit/test_launcher_job.py::test_a_controller_meets_trainers_of_two_nodes",),
    ),
    Mutant(
        "launcher/job.py",
        'return {"address": found, "host": host, "port": port}[kind]',
        'return {"address": found, "host": port, "port": host}[kind]',
        ("tests/unit/test_launcher_job.py::test_marks",),
    ),
    Mutant(
        "launcher/names.py",
        "if before is not None and _numbers(before) > _numbers(self.attempt):",
        "if before is not None and before > self.attempt:",
        ("tests/unit/test_launcher_names.py::test_an_older_attempt_sees_a_newer_one",),
    ),
    Mutant(
        "launcher/names.py",
        'text = "\\0".join((self.attempt, name, value))',
        'text = "\\0".join((name, value))',
        ("tests/unit/test_launcher_names.py::test_values_of_others_are_refused",),
    ),
    Mutant(
        "launcher/placement.py",
        "shared=trainers + servers * server_gpus > len(gpus),",
        "shared=trainers + servers * server_gpus >= len(gpus),",
        ("tests/unit/test_launcher_devices.py::test_trainers_first_then_servers",),
    ),
    Mutant(
        "launcher/slurm_script.py",
        'options.append(f"--het-group=0-{components - 1}")',
        'options.append(f"--het-group=0-{components}")',
        (
            "tests/unit/test_launcher_slurm.py::test_nodes_of_reward_workers_are_asked_for_without_gpus",
        ),
    ),
    Mutant(
        "utils/batch.py",
        "pad = [0, 0] * (v.ndim - 2) + [0, width - v.shape[1]]",
        "pad = [0, 0] * (v.ndim - 2) + [width - v.shape[1], 0]",
        (
            "tests/unit/test_batch.py::test_joined_batches_are_padded_on_the_right_with_what_stands_for_nothing",
        ),
    ),
    Mutant(
        "utils/disk.py",
        "error = error.__cause__ or error.__context__",
        "error = error.__cause__",
        ("tests/unit/test_disk.py::test_a_full_disk_is_seen_through_an_error_of_the_clean_up",),
    ),
    Mutant(
        "utils/env.py",
        "count = min(count, max(1, int(quota) // int(period)))",
        "count = min(count, int(quota) // int(period))",
        ("tests/unit/test_env.py::test_a_containers_quotas_bound_what_there_is",),
    ),
    Mutant(
        "utils/http.py",
        "return max(0.0, until.timestamp() - time.time())",
        "return until.timestamp() - time.time()",
        (
            "tests/unit/test_reward_workers.py::test_a_reward_with_options_of_a_file_whose_folder_is_on_its_path",
        ),
    ),
    Mutant(
        "utils/importing.py",
        'elif not all(module.split(".")) or "/" in module:',
        'elif not all(module.split(".")):',
        ("tests/unit/test_user_code.py::test_mistakes_in_data_and_code_are_one_line",),
    ),
    Mutant(
        "utils/pipeline.py",
        "if response.will_close:",
        "if False:",
        (
            "tests/unit/test_pipeline.py::test_a_server_that_closes_gets_what_it_did_not_answer_again",
        ),
    ),
    Mutant(
        "utils/retries.py",
        "return error.status is not None and error.status < 500 and error.status != TOO_MANY",
        "return error.status is not None and error.status < 500",
        ("tests/unit/test_client.py::test_a_server_that_asks_for_time_gets_it",),
    ),
    Mutant(
        "rpc/client.py",
        "head, body = await asyncio.shield(asked)",
        "head, body = await asked",
        ("tests/unit/test_rpc.py::test_a_coroutine_that_is_cancelled_leaves_no_gap",),
    ),
    Mutant(
        "rpc/messages.py",
        "if n in seen or n <= top - WINDOW:",
        "if n in seen:",
        ("tests/unit/test_rpc.py::test_numbers_that_came_long_ago_are_refused",),
    ),
    Mutant(
        "rpc/messages.py",
        "if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), head.digest):",
        "if False:",
        ("tests/unit/test_rpc.py::test_nothing_of_a_stranger_is_unpickled",),
    ),
    Mutant(
        "rpc/server.py",
        "await turns.wait(head.turn)",
        "pass",
        ("tests/unit/test_rpc.py::test_two_hundred_calls_at_once_begin_in_their_order",),
    ),
    Mutant(
        "controller/batch.py",
        "return self._sent.get((group, name), 0) <= number",
        "return True",
        (
            "tests/unit/test_controller.py::test_an_edit_that_went_with_a_later_call_outlives_the_result_of_an_earlier_one",
        ),
    ),
    Mutant(
        "controller/graph_plan.py",
        'earlier[f"{self.trained[call.model].name}: publish"] = 1 + ahead',
        'earlier[f"{self.trained[call.model].name}: publish"] = ahead',
        (
            "tests/unit/test_graph_runner.py::test_ppo_on_two_meshes_is_its_calls_and_the_publication_of_the_actor",
        ),
    ),
    Mutant(
        "controller/messages.py",
        "plain = plain.clone()",
        "pass",
        ("tests/unit/test_controller.py::test_plain_data_comes_and_objects_stay",),
    ),
    Mutant(
        "controller/registry.py",
        "self.shelf.drop(call.group, name)",
        "pass",
        ("tests/unit/test_controller.py::test_what_the_controller_drops_is_freed_on_workers",),
    ),
    Mutant(
        "controller/shelf.py",
        "middles = 2 * ends - lengths",
        "middles = 2 * ends + lengths",
        ("tests/unit/test_controller.py::test_rows_are_shared_by_tokens",),
    ),
    Mutant(
        "cli/diff.py",
        "return DIFFERENT if found.difference else 0",
        "return 0",
        ("tests/unit/test_diff.py::test_a_bug_is_named",),
    ),
    Mutant(
        "cli/status.py",
        '"tokens_per_s": round(tokens / sum(seconds), 1),',
        '"tokens_per_s": round(tokens / len(seconds), 1),',
        ("tests/unit/test_timeline.py::test_health_of_processes",),
    ),
    Mutant(
        "cli/trace.py",
        'while busy and busy[0][0] <= span["start"]:',
        'while busy and busy[0][0] < span["start"]:',
        ("tests/unit/test_timeline.py::test_lanes_are_few_and_nothing_overlaps",),
    ),
    Mutant(
        "cli/trace.py",
        'begin, end = taken[a - 1]["start"], taken[b - 1]["start"] + taken[b - 1]["seconds"]',
        'begin, end = taken[a - 1]["start"], taken[b - 1]["start"]',
        ("tests/unit/test_timeline.py::test_steps_are_cut_out_of_every_rank",),
    ),
    Mutant(
        "rollout/staleness.py",
        "batches = self.max_head_offpolicyness + version - self.start_version + 1",
        "batches = self.max_head_offpolicyness + version - self.start_version",
        ("tests/unit/test_staleness.py::test_synchronous_admits_one_batch_per_version",),
    ),
    Mutant(
        "rollout/staleness.py",
        "return oldest is not None and version - oldest > self.max_head_offpolicyness",
        "return oldest is not None and version - oldest >= self.max_head_offpolicyness",
        ("tests/unit/test_staleness.py::test_consumption_bound",),
    ),
)
