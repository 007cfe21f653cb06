"""Which tests ``make test`` leaves to ``make test-thorough``: further values of what it covers with a few.

Regular expressions of test names, from this folder on. Every one leaves some values of a test in ``make test``, which
``test_thorough.py`` checks.
"""

THOROUGH = (
    # sm_90a with every dtype, sm_107a with two, the others with one.
    r"mxfp8_quantize_cutedsl/test_machine_code\.py::test_(swiglu|quantize)\[(sm_100.|sm_103a)-float(16|32)\]",
    r"mxfp8_quantize_cutedsl/test_machine_code\.py::test_(swiglu|quantize)\[sm_107a-float16\]",
    r"all_reduce/test_all_reduce_machine_code\.py::test_.*\[(.*-)?(sm_100f|sm_103a)(-.*)?\]",
    r"all_reduce/test_all_reduce_machine_code\.py::test_peers_read_.*\[float(16|32)-.*\]",
    # PTX on a CPU, seconds each: a few sizes, groups and orders.
    r"all_reduce_norm/test_all_reduce_norm_machine_code\.py::test_.*\[(.*-)?(sm_100f|sm_103a)(-.*)?\]",
    r"all_reduce_norm/test_all_reduce_norm_bits\.py::test_one_shot_and_two_shot_.*\[(4|9)\]",
    r"all_reduce_norm/test_all_reduce_norm_bits\.py::test_launch_after_launch_.*\[[12]\]",
    r"ep_combine/test_ep_combine_machine_code\.py::test_.*\[(.*-)?(sm_100f|sm_103a)(-.*)?\]",
    r"ep_combine/test_ep_combine_bits\.py::test_any_size\[(1-4096-8-.*-3|3-96-2-.*-3|4-64-16-.*|5-2688-6-False-.)\]",
    r"ep_combine/test_ep_combine_bits\.py::test_dtypes_and_no_weights\[True-.*\]",
    r"ep_combine/test_ep_combine_bits\.py::test_launch_after_launch_.*\[[12]\]",
    r"all_reduce/test_all_reduce_bits\.py::test_a_rack_of_72_ranks",
    r"all_reduce/test_all_reduce_bits\.py::test_any_size\[(2|7|8|9|63|64|1024|4099)-.*\]",
    r"all_reduce/test_all_reduce_bits\.py::test_any_number_of_ranks\[(4|7|9)-.*\]",
    r"all_reduce/test_all_reduce_bits\.py::test_dtypes_in_place_and_out_of_place\[False-float(16|32)-.*\]",
    r"all_reduce/test_all_reduce_bits\.py::test_multimem_as_.*\[float(16|32)-.*\]",
    r"all_reduce/test_all_reduce_bits\.py::test_unaligned_views\[2-.*\]",
    r"all_reduce/test_all_reduce_bits\.py::test_launch_after_launch_of_any_kind\[[1-3]\]",
    r"dp_exchange/test_exchange_machine_code\.py::test_.*\[(.*-)?(sm_100f|sm_103a)(-.*)?\]",
    r"dp_exchange/test_exchange_bits\.py::test_more_ranks\[12\]",
    r"dp_exchange/test_exchange_bits\.py::test_numbers_of_experts_of_a_token\[(1|2)\]",
    r"dp_exchange/test_exchange_bits\.py::test_step_after_step_at_any_pace\[[12]\]",
    r"dp_exchange/test_exchange_bits\.py::test_payloads_and_hidden_sizes\[96-.*\]",
    r"moe_cutedsl/test_dispatch_bits\.py::test_dtypes_and_router_weights\[.*-floor-dtype[12]\]",
    r"moe_cutedsl/test_dispatch_bits\.py::test_hidden_sizes\[.*-(64|4096)\]",
    r"moe_cutedsl/test_combine_bits\.py::test_both_launch_shapes_on_every_target\[(sm_100f|sm_103a)\]",
    # One config of each kind; the others have other sizes.
    r"gemm_cutedsl/test_gemm_every_config\.py::test_every_config\[.*-the others-.*\]",
    # Compiled in other tests where the heuristic takes them.
    r"gemm_cutedsl/test_gemm_candidates\.py::test_candidates_compile_.*\[.*( swiglu m=| plain m=(16|64|256)).*\]",
    r"gemm_cutedsl/test_stream_k_run\.py::test_launch_after_launch\[False\]",
    # Processes that start vLLM: each version and each way once.
    r"seams/test_broken_plugin\.py::test_import_error_inside_names_the_plugin\[(config|kernels\.contracts)\]",
    r"seams/test_registries\.py::test_three_spawned_processes_agree\[0\.32\]",
    r"seams/test_communicator\.py::test_without_the_setting_.*\[0\.32\]",
    r"seams/test_all_reduce_norm_pass\.py::test_.*\[0\.32(-.*)?\]",
    r"seams/test_qk_norm\.py::test_.*\[0\.32(-.*)?\]",
    r"seams/test_configs\.py::test_without_our_flags_.*\[0\.32\]",
    r"seams/test_expert_balance\.py::test_.*\[(0\.32-sm_90a|0\.32-sm_100a|0\.33-reference)\]",
    r"seams/test_expert_parts\.py::test_.*\[(0\.32-sm_90a|0\.33-reference)\]",
    r"seams/test_all_to_all\.py::test_.*\[(0\.32-(bf16-.*|mxfp8-sm_.*)|0\.33-(bf16-reference|mxfp8-sm_90a))\]",
    r"seams/test_batched_experts\.py::test_.*\[(0\.32-sm_90a|0\.32-sm_100a|0\.33-reference)(-.*)?\]",
)
