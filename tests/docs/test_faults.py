"""Each fault that docs/clusters.md lists is tested, by the tests named here."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The fault, as in the first column of the page's tables -> its tests.
FAULTS = {
    "one process has another recipe, data or `JAX_*` setting; another source or JAX": (
        "processes_that_differ_are_named",
        "settings_that_change_results_are_recorded_and_equal_in_all_processes",
        "a_process_with_other_code_is_named",
    ),
    "a process does not connect": (
        "while_processes_gather_the_first_one_names_those_absent",
        "a_missing_process_is_named_to_all",
        "a_detected_cluster_whose_processes_do_not_come_is_one_line",
    ),
    "a process reaches another run's process 0": (
        "a_process_of_another_run_is_told_so_and_takes_no_place",
    ),
    "JAX cannot read the cluster's description; a host's name does not resolve": (
        "a_detected_coordinators_name_is_awaited",
        "a_machine_that_does_not_know_its_own_name_says_so",
        "a_cluster_that_cannot_be_read_is_one_line",
        "variables_that_no_restart_would_mend_are_a_users_error",
    ),
    "a process ends with an error": ("one_failing_process_ends_all_with_its_message",),
    "a process is killed": (
        "without_a_launcher_losing_one_process_ends_the_other_within_a_minute",
    ),
    "a host falls silent": ("a_silent_process_is_named",),
    "no progress": ("all_processes_name_the_slowest_one_after_their_stacks",),
    "a mount fails, a disk is full, a server is busy": (
        "each_cause_has_its_exit_code",
        "a_full_disk_is_one_line_and_the_run_goes_on_with_more_room",
    ),
    "another start holds the folder's lock": (
        "another_hosts_lock_is_waited_for_and_then_the_remedy_is_printed",
        "one_of_two_simultaneous_starts_holds_it_and_is_named_to_the_other",
    ),
    "the lock in a bucket is lost, or not renewed for 50 s": (
        "a_process_that_lost_its_lease_ends",
        "a_process_that_cannot_renew_ends_before_another_may_take_over",
    ),
    "SIGTERM or SIGUSR1 while downloading, preparing, compiling": (
        "a_signal_ends_a_command_during_a_long_call",
        "sigterm_ends_a_command_that_is_pid_1",
    ),
    "non-finite parameters": ("an_update_that_overflows_is_not_saved",),
    "error in the input (2)": (
        "follow_shows_the_last_lines_of_the_worker_that_failed",
        "slurm_requeues_exit_codes_worth_another_start",
        "only_exit_code_2_fails_a_jobset_for_good_and_maintenance_does_not_count",
    ),
    "lost process, mount, lock (75)": (
        "exit_codes_worth_another_start_are_restarted_until_no_checkpoint_comes",
        "slurm_requeues_exit_codes_worth_another_start",
        "only_exit_code_2_fails_a_jobset_for_good_and_maintenance_does_not_count",
    ),
    "crash, killed (1, 134, 137)": (
        "which_exit_codes_are_worth_another_start",
        "slurm_requeues_exit_codes_worth_another_start",
    ),
    "preemption or time limit (143)": (
        "a_preempted_node_under_an_active_queued_resource_is_replaced",
        "a_preempted_instance_is_replaced_with_its_whole_group",
    ),
    "host maintenance": (
        "only_exit_code_2_fails_a_jobset_for_good_and_maintenance_does_not_count",
    ),
    "no checkpoint in 6 starts": (
        "exit_codes_worth_another_start_are_restarted_until_no_checkpoint_comes",
        "slurm_gives_up_after_several_starts_without_a_checkpoint",
        "the_container_counts_its_starts_and_needs_the_compilers_flags",
    ),
    "Slurm's controller, or the storage that holds the checkpoints, does not answer": (
        "slurm_survives_a_temporarily_unresponsive_controller_and_store",
        "the_container_counts_its_starts_and_needs_the_compilers_flags",
    ),
    "cancelled, Ctrl-C": (
        "ctrl_c_leaves_the_workers_running",
        "slurm_requeues_exit_codes_worth_another_start",
    ),
    "compiler flags unavailable": (
        "a_job_without_the_compilers_flags_does_not_start",
        "slurm_does_not_train_without_the_compilers_flags",
        "the_container_counts_its_starts_and_needs_the_compilers_flags",
    ),
    "laptop loses its network": ("a_lost_network_is_waited_for_with_growing_pauses",),
    "login expired, no permission": ("an_expired_login_ends_a_run",),
    "quota is zero": ("a_quota_of_zero_ends_with_the_reason",),
    "no capacity": ("without_capacity_it_retries_with_growing_pauses",),
    "installation fails": ("a_failed_installation_is_retried",),
    "`delete` finds nothing": ("delete_in_the_wrong_zone_deletes_nothing_and_says_so",),
}


def test_every_fault_on_the_page_has_tests_that_exist():
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    tables = re.findall(r"^(\| fault \|.*(?:\n\|.*)+)", text, re.MULTILINE)
    listed = [row.split("|")[1].strip() for table in tables for row in table.splitlines()[2:]]
    assert len(tables) == 2 and len(listed) > 20 and listed == [*FAULTS]
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert all(FAULTS.values())
    assert {name for names in FAULTS.values() for name in names} - tests == set()
