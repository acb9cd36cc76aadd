"""Bugs in what is let into the store: bytes that are not what their key says."""

from __future__ import annotations

from poolcheck.mutant import Mutant, bug

SEEN = "tests/integrations/transformers/test_entry.py"
REGISTERED = "tests/kvstore/engine/test_registered.py"

ENTRY: tuple[Mutant, ...] = (
    bug(
        "a replaced tensor passes",
        "ours: noticed, compared by its shape alone, and accepted",
        "kvstore.engine.registered",
        "                same_layout(given, found)\n",
        "                same_layout(given, found)\n            return\n",
        f"{REGISTERED}::test_other_tensors_are_refused_until_they_are_registered",
    ),
    bug(
        "moved memory passes",
        "ours: torch has one storage object before and after",
        "kvstore.engine.registered",
        "                and list(map(Tensor.data_ptr, now)) == self._addresses\n",
        "",
        f"{REGISTERED}::test_other_tensors_are_refused_until_they_are_registered",
    ),
    bug(
        "tensors are looked at before the copy alone",
        "ours: a tensor is replaced between the call and its copy",
        "kvstore.client.save",
        "                    copier.check_unchanged()\n                answer",
        "                answer",
        f"{REGISTERED}::test_tensors_that_are_replaced_while_a_job_copies_are_refused_too",
    ),
    bug(
        "a prefix is loaded for an assistant",
        "transformers 5.23: the whole prompt is fed on top of it",
        "kvstore.integrations.transformers.prompts",
        "        may_load=not (is_assisted or wants_all_columns),\n",
        "        may_load=not wants_all_columns,\n",
        f"{SEEN}::test_assisted_decoding_on_a_stored_prefix[prompt_lookup_num_tokens-argument]",
    ),
    bug(
        "whatever fills the cache is saved",
        "transformers 5.23: the prefix twice, cut to the right length",
        "kvstore.integrations.transformers.witness",
        '        if not self._is_of_prompt(start, end, tokens, positions, given.get("attention_mask")):\n',
        "        if False:\n",
        f"{SEEN}::test_a_loop_that_feeds_something_else_saves_nothing",
    ),
    bug(
        "positions are not looked at",
        "ours: the tokens are right, and their angles are not",
        "kvstore.integrations.transformers.witness",
        "        if positions is not None:\n            places",
        "        if False:\n            places",
        f"{SEEN}::test_a_loop_that_feeds_something_else_saves_nothing[a_place_too_far]",
    ),
    bug(
        "a model that changed meanwhile is saved",
        "ours: weights are looked at when a call begins, and the blocks are saved at its end",
        "kvstore.integrations.transformers.prefix_cached",
        "            self._snapshot.check(self.model)  # Since the call began; it may have been of both models.\n",
        "",
        f"{SEEN}::test_a_model_that_changes_during_a_call_saves_nothing[edited]",
    ),
    bug(
        "padding counts where the model drops positions",
        "transformers 5.23: prepare_inputs_for_generation of HyperCLOVAX Vision",
        "kvstore.integrations.transformers.witness",
        "            return False  # The model counts by itself, and may count padding too.\n",
        "            pass\n",
        "tests/integrations/transformers/test_probe.py::test_rows_without_positions_are_not_saved_where_one_has_padding",
    ),
    bug(
        "a probe that compares nothing",
        "transformers 5.23: Kosmos-2.5 counts positions by tokens",
        "kvstore.integrations.transformers.probe",
        "        if int(is_alike.sum()) < (len(is_alike) if needs_all else len(is_alike) // 2 + 1):\n",
        "        if False:\n",
        "tests/integrations/transformers/test_probe.py::test_positions_that_tokens_decide[config]",
    ),
    bug(
        "a window is trusted",
        "transformers 5.23: any config with sliding_window gets window layers, whatever the masks are",
        "kvstore.integrations.transformers.probe",
        "    model = _with_short_windows(model)\n",
        "",
        "tests/integrations/transformers/test_probe.py::test_a_window_that_the_cache_has_and_the_masks_have_not",
    ),
    bug(
        "columns that leave a window with a crop are lost",
        "transformers 5.23: with an assistant, layers keep all columns until the crop",
        "kvstore.integrations.transformers.cache.window_layer",
        "        if keys is not None:\n",
        "        if False:\n",
        "tests/integrations/transformers/cache/test_window_layer.py::test_steps_that_are_taken_back",
    ),
    bug(
        "an address is a weight's name",
        "ours: freed weights, and others read in at their address",
        "kvstore.integrations.transformers.identity",
        "place = tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage())",
        "place = (tensor.data_ptr(),)",
        "tests/integrations/transformers/test_identity.py::test_other_weights_at_the_address_of_freed_ones_are_noticed",
    ),
    bug(
        "only counted writes are seen",
        "ours: adapters are merged through .data",
        "kvstore.integrations.transformers.identity",
        "    if is_plain(tensor):\n",
        "    if False:\n",
        "tests/integrations/transformers/test_identity.py::test_writes_through_data_are_noticed[True]",
    ),
    bug(
        "pages of a model that changed are saved",
        "ours: training mode, autocast and new weights were looked at only when the cache was made",
        "kvstore.integrations.transformers.paged.store",
        "            return ()\n",
        "            pass\n",
        "tests/integrations/transformers/paged/test_weights.py::test_what_a_writer_computes_otherwise_is_not_shared",
    ),
    bug(
        "the versions of the libraries do not count",
        "ours: a release of transformers computes the same model otherwise",
        "kvstore.integrations.transformers.identity",
        '        text("libraries", [transformers.__version__, str(torch.__version__)]),\n',
        "",
        "tests/integrations/transformers/test_unlike.py::test_what_is_changed_for_all_models_counts[another_transformers-None]",
    ),
)
