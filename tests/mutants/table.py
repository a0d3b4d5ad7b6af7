"""The faults, by room (see __main__.py)."""

from __future__ import annotations

from tests.mutants import Mutant

MUTANTS = (
    Mutant(
        "config/presets.py",
        'return math.prod(self.degree(letter) for letter in "dtpc")',
        'return math.prod(self.degree(letter) for letter in "dtp")',
        ("tests/unit/test_allocation.py::test_colons_any_order_and_colocation",),
    ),
    Mutant(
        "config/base.py",
        "and (self.le is None or value <= self.le)",
        "and (self.le is None or value < self.le)",
        ("tests/unit/test_config_check.py::test_a_sound_ppo_passes",),
    ),
    Mutant(
        "config/rules.py",
        "overlap_param_gather             | overlap_grad_reduce",
        "overlap_param_gather             | distributed",
        ("tests/unit/test_config_check.py::test_problem_is_named",),
    ),
    Mutant(
        "config/rules.py",
        "vpp>1                            | pp>1",
        "vpp>1                            | pp>0",
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
        "largest = ANY_INT if isinstance(value, int) else ANY_FLOAT",
        "largest = ANY_INT if isinstance(value, int) else None",
        ("tests/unit/test_config_check.py::test_every_number_is_finite_and_within_its_bounds",),
    ),
    Mutant(
        "config/recipe_engines.py",
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
        'return {"address": place, "host": host, "port": port}[kind]',
        'return {"address": place, "host": port, "port": host}[kind]',
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
        "if policy and not servers[0].around and trainers + policy > room:",
        "if policy and not servers[0].around and trainers + policy >= room:",
        ("tests/unit/test_launcher_devices.py::test_trainers_first_then_servers",),
    ),
    Mutant(
        "launcher/slurm.py",
        'yield f"--het-group=0-{components}"',
        'yield f"--het-group=0-{components + 1}"',
        (
            "tests/unit/test_launcher_slurm.py::test_nodes_of_reward_workers_are_asked_for_without_gpus",
        ),
    ),
    Mutant(
        "api/tokens.py",
        "pad = [0, 0] * (v.ndim - 2) + [0, width - v.shape[1]]",
        "pad = [0, 0] * (v.ndim - 2) + [width - v.shape[1], 0]",
        (
            "tests/unit/test_batch.py::test_joined_batches_are_padded_on_the_right_with_what_stands_for_nothing",
        ),
    ),
    Mutant(
        "utils/files.py",
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
        'if status < 300 and not (isinstance(answer, dict) and answer.get("success") is False):',
        "if status < 400:",
        (
            "tests/unit/test_liveness.py::test_an_answer_that_says_it_failed_is_an_error_whatever_its_status",
        ),
    ),
    Mutant(
        "utils/importing.py",
        'elif not all(module.split(".")) or "/" in module:',
        'elif not all(module.split(".")):',
        ("tests/unit/test_user_code.py::test_mistakes_in_data_and_code_are_one_line",),
    ),
    Mutant(
        "utils/http.py",
        "return error.status is not None and error.status < 500 and error.status != TOO_MANY",
        "return error.status is not None and error.status < 500",
        ("tests/unit/test_client.py::test_a_server_that_asks_for_time_gets_it",),
    ),
    Mutant(
        "rpc/link.py",
        "if future.set_running_or_notify_cancel():  # else whoever waited for it has gone",
        "if True:",
        ("tests/unit/test_rpc.py::test_a_coroutine_that_is_cancelled_leaves_no_gap",),
    ),
    Mutant(
        "rpc/frames.py",
        "if not hmac.compare_digest(tag, own_tag):",
        "if False:",
        ("tests/unit/test_rpc.py::test_a_frame_that_is_changed_on_its_way_ends_the_link",),
    ),
    Mutant(
        "rpc/frames.py",
        'if not hmac.compare_digest(answer[_NONCE:], _proof(token, b"dialer", about)):',
        "if False:",
        ("tests/unit/test_rpc.py::test_nothing_of_a_stranger_is_unpickled",),
    ),
    Mutant(
        "rpc/frames.py",
        'digest = hashlib.blake2b(counter.to_bytes(8, "little"), key=key, digest_size=_TAG)',
        "digest = hashlib.blake2b(key=key, digest_size=_TAG)",
        ("tests/unit/test_rpc.py::test_a_frame_that_is_sent_again_ends_the_link",),
    ),
    Mutant(
        "controller/batch.py",
        "return self._set.get(name, 0) < number",
        "return True",
        (
            "tests/unit/test_controller.py::test_an_edit_that_went_with_a_later_call_outlives_the_result_of_an_earlier_one",
        ),
    ),
    Mutant(
        "controller/graph.py",
        "taken |= task.ranks",
        "taken |= set()",
        ("tests/unit/test_graph.py::test_every_rank_sees_its_tasks_in_the_one_order",),
    ),
    Mutant(
        "rpc/link.py",
        'if torch is None or type(obj) is not getattr(torch, "Tensor", None):',
        "if True:",
        ("tests/unit/test_controller.py::test_plain_data_comes_and_objects_stay",),
    ),
    Mutant(
        "controller/worker.py",
        "store.drop(group, name)",
        "pass",
        ("tests/unit/test_controller.py::test_what_the_controller_drops_is_freed_on_workers",),
    ),
    Mutant(
        "controller/store.py",
        "middles = 2 * ends - lengths",
        "middles = 2 * ends + lengths",
        ("tests/unit/test_controller.py::test_rows_are_shared_by_tokens",),
    ),
    Mutant(
        "cli/diff.py",
        "return DIFFERENT",
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
        "rollout/episodes.py",
        'self._trained["trained_samples"] += count - left_out',
        'self._trained["trained_samples"] += count',
        ("tests/unit/test_accounting.py::test_samples_whose_update_was_skipped_are_not_trained",),
    ),
    Mutant(
        "rollout/episodes.py",
        "if seen < ENOUGH or len(failed) <= self._bound * seen:",
        "if len(failed) <= self._bound * seen:",
        (
            "tests/unit/test_failed_samples.py::test_a_group_that_failures_leave_too_small_is_replaced",
        ),
    ),
    Mutant(
        "rollout/gateway/session.py",
        "if chat.told == request.told and all(a.key == b.key for a, b in begins):",
        "if all(a.key == b.key for a, b in begins):",
        ("tests/unit/test_gateway.py::test_a_chat_goes_on_with_the_same_tools_alone",),
    ),
    Mutant(
        "rollout/gateway/session.py",
        "most = min(most, context - length)",
        "pass",
        ("tests/unit/test_gateway.py::test_an_answer_ends_where_the_context_does",),
    ),
    Mutant(
        "rollout/generation.py",
        'params["max_new_tokens"] = config.max_new_tokens - written',
        'params["max_new_tokens"] = config.max_new_tokens',
        ("tests/unit/test_answers.py::test_an_answer_is_for_the_same_request_only_and_once",),
    ),
    Mutant(
        "rollout/staleness.py",
        "return [min(count, max(0, n - j * count)) for j, n in enumerate(alive)]",
        "return [min(count, max(0, n)) for j, n in enumerate(alive)]",
        ("tests/unit/test_order.py::test_a_batch_is_the_first_come_of_all_that_keep_the_rule",),
    ),
    Mutant(
        "rollout/staleness.py",
        "due = left",
        "pass",
        ("tests/unit/test_order.py::test_a_batch_is_the_first_come_of_all_that_keep_the_rule",),
    ),
    Mutant(
        "rollout/episodes.py",
        "self._rejected.difference_update(numbers)",
        "pass",
        (
            "tests/unit/test_outcomes.py::test_draws_are_the_same_whichever_episode_ends_first_and_after_a_resume",
        ),
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
    Mutant(
        "rollout/trajectory.py",
        "yield [(t, t.response is not None and t.number not in seen) for t in path]",
        "yield [(t, t.response is not None) for t in path]",
        (
            "tests/unit/test_trajectory.py::test_every_sampled_token_is_trained_in_one_row_as_it_was_sampled",
        ),
    ),
    Mutant(
        "trainer/scores.py",
        "right = [r >= 1 for r in rewards]",
        "right = [r > 0 for r in rewards]",
        ("tests/unit/test_evaluation.py::test_intervals_are_those_of_prompts",),
    ),
    Mutant(
        "trainer/evaluation.py",
        'means[f"eval/{figure}"] = sum(metrics[key] for key in keys) / len(keys)',
        'means[f"eval/{figure}"] = sum(metrics[key] for key in keys)',
        (
            "tests/unit/test_evaluation.py::test_the_mean_over_data_sets_is_nan_where_one_says_nothing",
        ),
    ),
    Mutant(
        "trainer/recover.py",
        'for old in [c for c in whole if c.step <= info["step"]][: -self._config.keep_last]:',
        'for old in [c for c in whole if c.step <= info["step"]][: -self._config.keep_last - 1]:',
        ("tests/unit/test_recover.py::test_a_run_continues_where_its_newest_checkpoint_is",),
    ),
    Mutant(
        "trainer/rollout_metrics.py",
        '"reward/groups_all_right": (groups["min"] >= PASSES).float().mean().item(),',
        '"reward/groups_all_right": (groups["max"] >= PASSES).float().mean().item(),',
        ("tests/unit/test_trainer.py::test_rollout_figures",),
    ),
    Mutant(
        "data/dataset.py",
        "kept = [row for row in rows if num_tokens(row) <= cfg.max_length]",
        "kept = [row for row in rows if num_tokens(row) < cfg.max_length]",
        ("tests/unit/test_data.py::test_long_rows_are_dropped_with_a_count",),
    ),
    Mutant(
        "data/tokenizer.py",
        "response_ids = template.encode(response) + [template.eos_token_id]",
        "response_ids = template.encode(response)",
        ("tests/unit/test_data.py::test_sft_rows_train_on_the_answer_and_eos",),
    ),
    Mutant(
        "data/dataset.py",
        'batch["loss_mask"][i, :n] = torch.tensor(row["loss_mask"])',
        'batch["loss_mask"][i, :n] = True',
        ("tests/unit/test_data.py::test_collate_sft_pads_on_the_right",),
    ),
    Mutant(
        "data/sources.py",
        "left = set(range(len(rows))).difference(seen)",
        "left = set(range(len(rows)))",
        (
            "tests/unit/test_datasets.py::test_prompts_of_the_training_data_leave_the_validation_data",
        ),
    ),
    Mutant(
        "data/tokenizer.py",
        "mask += [trained] * len(piece)",
        "mask += [True] * len(piece)",
        ("tests/unit/test_data.py::test_sft_masks_are_those_of_a_template_that_marks_the_answers",),
    ),
    Mutant(
        "api/batch.py",
        "if not torch.equal(value.lengths, self.lengths[self.rows]):",
        "if False:",
        ("tests/unit/test_batch.py::test_what_does_not_fit_is_named",),
    ),
    Mutant(
        "server/kv_cache.py",
        "hidden |= keys <= last - window",
        "hidden |= keys < last - window",
        ("tests/unit/test_server_runner.py::test_ragged_batches_give_the_models_logits",),
    ),
    Mutant(
        "server/kv_cache.py",
        "state[dst] = state[src]",
        "state[dst] = state[dst]",
        (
            "tests/unit/test_server_states.py::test_rows_that_move_and_end_leave_the_others_as_they_are",
        ),
    ),
    Mutant(
        "server/runner.py",
        "or (self._has_states and length > chunk[0][0].read)",
        "or (self._has_states and False)",
        ("tests/unit/test_server_runner.py::test_ragged_batches_give_the_models_logits",),
    ),
    Mutant(
        "server/kv_cache.py",
        "q[..., -1] = sinks[:, None]",
        "q[..., -1] = 0 * sinks[:, None]",
        (
            "tests/unit/test_server_runner.py::test_windows_in_some_layers_are_served_deterministically_too",
        ),
    ),
    Mutant(
        "server/kv_cache.py",
        "keep = min(positions, old.shape[3])",
        "keep = min(used, old.shape[3])",
        ("tests/unit/test_server_runner.py::test_rows_survive_growth_and_moves_of_the_cache",),
    ),
    Mutant(
        "server/kv_cache.py",
        "self._masks[width, window] = (apart >= 0) & (apart < window)",
        "self._masks[width, window] = (apart >= 0) & (apart <= window)",
        ("tests/unit/test_server_runner.py::test_ragged_batches_give_the_models_logits",),
    ),
    Mutant(
        "observability/intervals.py",
        "z2 = NormalDist().inv_cdf(0.5 + LEVEL / 2) ** 2",
        "z2 = NormalDist().inv_cdf(0.5 + LEVEL / 2)",
        ("tests/unit/test_intervals.py::test_all_right_is_not_certain",),
    ),
    Mutant(
        "observability/intervals.py",
        "variance = float(np.square(sums - p * counts).sum()) / n**2",
        "variance = float(np.square(sums - p * counts).sum()) / n",
        ("tests/unit/test_intervals.py::test_samples_that_agree_within_a_prompt_are_worth_one",),
    ),
    Mutant(
        "observability/timeline.py",
        'return [p for p in processes if p["rank"] < world]',
        "return processes",
        ("tests/unit/test_timeline.py::test_presence",),
    ),
    Mutant(
        "observability/stats_tracker.py",
        "self.count += other.count",
        "pass",
        ("tests/unit/test_stats_tracker.py::test_scalars_are_averaged_under_their_scopes",),
    ),
    Mutant(
        "observability/stats_tracker.py",
        "self._muted, self._row_by_row = self._muted or mute, True",
        "self._muted, self._row_by_row = mute, True",
        ("tests/unit/test_stats_tracker.py::test_what_is_muted_is_checked_and_left_out",),
    ),
    Mutant(
        "engine/activations.py",
        "now.wait_event(gone.left)",
        "pass",
        ("tests/unit/test_activations.py::test_copies_run_beside_the_layers_and_change_no_bit",),
    ),
    Mutant(
        "engine/micro_batch.py",
        "coming += [thread.submit(ready, after) for after in micro_batches[i + 1 : i + 2]]",
        "coming += [thread.submit(ready, after) for after in micro_batches[i + 1 :]]",
        (
            "tests/unit/test_ahead.py::test_micro_batches_come_in_order_with_one_made_ready_meanwhile",
        ),
    ),
    Mutant(
        "engine/micro_batch.py",
        "return ratio >= self.least",
        "return True",
        (
            "tests/dist/test_prefix_tries.py::test_auto_shares_where_it_pays_and_leaves_the_rest_to_the_bit",
        ),
    ),
    Mutant(
        "engine/micro_batch.py",
        "share = layout.tp if layout.sequence_parallel else 1",
        "share = 1",
        (
            "tests/unit/test_packing_properties.py::test_slots_hold_their_sequences_and_cut_into_equal_shares",
        ),
    ),
    Mutant(
        "parallel/mcore.py",
        "patch(clip_grads, l2_norm_impl=norm)",
        "pass",
        ("tests/dist/test_waits.py::test_a_step_waits_as_often_however_many_micro_batches_it_has",),
    ),
    Mutant(
        "models/attention.py",
        "if isinstance(packed, SlotParams):",
        "if False:",
        ("tests/dist/test_waits.py::test_a_step_waits_as_often_however_many_micro_batches_it_has",),
    ),
    Mutant(
        "engine/optimizer.py",
        "lr_decay_steps=max(steps, warmup) + 1,",
        "lr_decay_steps=max(steps, warmup),",
        (
            "tests/unit/test_schedule.py::test_the_peak_is_reached_and_the_fall_ends_at_the_run_s_end",
        ),
    ),
    Mutant(
        "kernels/lm_head.py",
        "return tl.where(at == label, g_label, 0.0) - p * factor",
        "return tl.where(at == label, g_label, 0.0) + p * factor",
        ("tests/unit/test_kernels_lm_head.py::test_values_and_gradients_equal_the_dense_formulas",),
    ),
    Mutant(
        "kernels/lm_head.py",
        "s = shrink * s + tl.sum(e, 0)",
        "s = s + tl.sum(e, 0)",
        ("tests/unit/test_kernels_lm_head.py::test_values_and_gradients_equal_the_dense_formulas",),
    ),
    Mutant(
        "kernels/lm_head.py",
        "u = shrink * (u + s * shift) + tl.sum(e * tl.maximum(d, _NOTHING), 0)",
        "u = shrink * u + tl.sum(e * tl.maximum(d, _NOTHING), 0)",
        ("tests/unit/test_kernels_lm_head.py::test_values_and_gradients_equal_the_dense_formulas",),
    ),
    Mutant(
        "parallel/packing.py",
        "return -(-max(1, length) // align) * align",
        "return max(1, length) // align * align",
        ("tests/unit/test_packing.py::test_pack_layout",),
    ),
    Mutant(
        "parallel/packing.py",
        "count = -(-count // multiple_of) * multiple_of",
        "pass",
        (
            "tests/unit/test_packing_properties.py::test_every_sequence_once_within_the_budget_in_equally_many_micro_batches",
        ),
    ),
    Mutant(
        "parallel/packing.py",
        "for chunk in (rank, 2 * cp - 1 - rank):",
        "for chunk in (2 * rank, 2 * rank + 1):",
        (
            "tests/unit/test_packing_properties.py::test_zigzag_shares_cover_everything_once_and_are_balanced",
        ),
    ),
    Mutant(
        "models/gated_delta.py",
        "earlier = earlier.masked_fill((position[back:] < back)[:, None], 0.0)",
        "pass",
        ("tests/unit/test_gated_delta.py::test_the_convolution_ends_where_a_sequence_begins",),
    ),
    Mutant(
        "models/gated_delta.py",
        "state = state * chunk_decay[here] + k[here].mT @ change",
        "state = state + k[here].mT @ change",
        ("tests/unit/test_gated_delta.py::test_the_rule_is_the_recurrence",),
    ),
    Mutant(
        "models/gated_delta.py",
        "if self.tp_size == 1 or self.config.sequence_parallel:",
        "if self.tp_size:",
        ("tests/dist/test_gated_delta.py::test_every_rank_adds_its_heads_to_the_norms_gradient",),
    ),
    Mutant(
        "models/ops.py",
        "yield Segment(rank, 0, 0, 0, rows, rank * cols, cols)",
        "yield Segment(rank, 0, 0, 0, rows, 0, cols)",
        ("tests/unit/test_piece_table.py::test_every_element_once_in_every_layout",),
    ),
    Mutant(
        "models/ops.py",
        "start, stop = rank * per, min((rank + 1) * per, m.vocab_size)",
        "start, stop = rank * per, (rank + 1) * per",
        ("tests/unit/test_piece_table.py::test_every_element_once_in_every_layout",),
    ),
    Mutant(
        "models/ops.py",
        "n = min(stop, (rank + 1) * per) - row",
        "n = stop - row",
        ("tests/unit/test_piece_table.py::test_every_element_once_in_every_layout",),
    ),
    Mutant(
        "models/piece_table.py",
        "return -(-vocab_size // unit) * unit",
        "return vocab_size // unit * unit",
        ("tests/unit/test_piece_table.py::test_every_element_once_in_every_layout",),
    ),
    Mutant(
        "transfer/boxes.py",
        "return (start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None",
        "return (start, stop) if any(x < y for x, y in zip(start, stop, strict=True)) else None",
        ("tests/unit/test_slice_plan.py::test_numbers_in_no_box_are_counted",),
    ),
    Mutant(
        "weight_sync/broadcast.py",
        "self.pair[bucket.index % 2] if self.pair else None,",
        "self.pair[0] if self.pair else None,",
        (
            "tests/unit/test_weight_sync_stream.py::test_a_bucket_follows_when_the_one_before_is_answered_for",
        ),
    ),
    Mutant(
        "weight_sync/plan.py",
        'body: dict[str, Any] = {"flush_cache": last and flush}',
        'body: dict[str, Any] = {"flush_cache": flush}',
        (
            "tests/unit/test_weight_sync_plan.py::test_only_the_last_bucket_flushes_and_bumps_the_version",
        ),
    ),
    Mutant(
        "weight_sync/servers.py",
        "if info.replicas > 1 or info.stages > 1:",
        "if info.replicas > 1:",
        (
            "tests/unit/test_weight_sync_servers.py::test_a_server_with_replicas_or_stages_takes_weights_from_files_alone",
        ),
    ),
    Mutant(
        "weight_sync/receiver/megarl_receiver/commands.py",
        "start += -(-nbytes // ALIGN) * ALIGN",
        "start += nbytes",
        (
            "tests/dist/test_colocated_sync.py::test_messages_of_odd_sizes_are_read_where_they_were_written",
        ),
    ),
    Mutant(
        "transfer/plan.py",
        "if group and any(load[end] + nbytes > limit for end in ends(m)):",
        "if False:",
        ("tests/unit/test_slice_plan.py::test_messages_rounds_and_senders_are_bounded",),
    ),
    Mutant(
        "ckpt/safetensors.py",
        "end += m.nbytes",
        "end = m.nbytes",
        ("tests/unit/test_convert.py::test_there_and_back_is_bit_exact",),
    ),
    Mutant(
        "algos/advantages.py",
        "return ((within + config.reward_bias) * config.reward_scaling).float()",
        "return (within * config.reward_scaling + config.reward_bias).float()",
        ("tests/unit/test_advantages.py::test_reward_shaping_is_bias_then_scale_then_clip",),
    ),
    Mutant(
        "algos/advantages.py",
        "return torch.where(groups.tied, 0.0, x / (groups.std(kind) + eps)).float()",
        "return torch.where(groups.tied, 0.0, x * (groups.std(kind) + eps)).float()",
        ("tests/unit/test_advantages.py::test_group_mean_and_std_by_hand",),
    ),
    Mutant(
        "algos/estimators.py",
        "s[own] += weight * grpo_advantages(values[own], group_ids[own], eps=eps)",
        "s[own] += grpo_advantages(weight * values[own], group_ids[own], eps=eps)",
        ("tests/unit/test_conventions.py::test_gdpo_of_trl",),
    ),
    Mutant(
        "algos/losses.py",
        "return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum()",
        "return (masked.sum(1) / mask.shape[1]).sum()",
        ("tests/unit/test_losses.py::test_value_gradient_weight_and_clip_counts_equal_the_loop",),
    ),
    Mutant(
        "algos/kl.py",
        "return log_r.clamp(max=MAX_LOG_RATIO).expm1() - log_r",
        "return log_r.clamp(max=MAX_LOG_RATIO).expm1() + log_r",
        ("tests/unit/test_kl.py::test_values_of_one_token",),
    ),
    Mutant(
        "algos/policy_loss.py",
        "loss = torch.where(dropped, 0.0, loss * weight)",
        "loss = torch.where(dropped, 0.0, loss)",
        ("tests/unit/test_losses.py::test_value_gradient_weight_and_clip_counts_equal_the_loop",),
    ),
    Mutant(
        "algos/surrogates.py",
        "return torch.where(mask, logp - old, 0.0)",
        "return logp - old",
        ("tests/unit/test_surrogates.py::test_value_and_gradient_equal_the_loop",),
    ),
)
