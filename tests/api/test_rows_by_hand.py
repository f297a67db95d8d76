"""A number of rows given by hand is taken, and what the plan would have taken is told."""

import re

import brim


def test_the_number_holds_the_plans_own_is_told_and_the_texts_are_the_same(zero_shot):
    rows = {"question": [f"add {number} and 2 =" for number in range(20)]}
    model, by_hand, planned = brim.Model({**zero_shot, "trainer": {"type": "none"}}), [], []
    three = model.predict(rows, batch_size=3, say=by_hand.append).predictions
    alone = model.predict(rows, say=planned.append).predictions
    (first,) = [line for line in by_hand if line.startswith("plan: engine")]
    assert "; 3 rows of up to " in first
    assert first.endswith("(a number by hand)")
    (own,) = [line for line in planned if line.startswith("plan: engine")]
    found = re.search(r"; (\d+) rows of .* \((.*)\)$", own)
    assert found is not None
    assert f"plan: by itself the plan would take {found[1]} rows ({found[2]})" in by_hand
    assert three["answer_response"].tolist() == alone["answer_response"].tolist()
