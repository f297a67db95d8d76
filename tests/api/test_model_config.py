"""A configuration may be given as a mapping or as a Config: the model is the same."""

import brim


def test_a_config_is_taken_as_the_mapping_it_was_made_from(config):
    # What nobody has set is still to be chosen: here the batch size, 8 / 2.
    mapping = {**config, "trainer": {"type": "finetune", "effective_batch_size": 8, "gradient_accumulation_steps": 2}}
    given = brim.Model(brim.Model(mapping).config)
    assert given.config == brim.Model(mapping).config
    assert given.config.model_fields_set == brim.Model(mapping).config.model_fields_set
    assert given.config.trainer.model_fields_set == brim.Model(mapping).config.trainer.model_fields_set
    assert given.notes == brim.Model(mapping).notes
