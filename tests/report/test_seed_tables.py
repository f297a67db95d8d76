"""Tables of a comparison, cell by cell."""

from tests.report.hand_made_runs import figures, two_by_three

from brim.report import cost_table, loss_tables, markdown, run_table, summaries


def test_losses_and_differences():
    (table,) = loss_tables(summaries(two_by_three()), first="a", splits=["validation"])
    assert table.caption == "Final loss on the validation rows, and how it differs from that of a"
    assert table.heads == ("configuration", "loss", "difference", "what the seeds show")
    assert table.rows == [
        ("a", "2.1000 ± 0.2484", "", ""),
        ("b", "1.9010 ± 0.2509", "-0.1990 ± 0.0025", "lower"),
    ]


def test_seeds_are_named_where_they_are_not_the_same():
    runs = two_by_three()
    del runs["b"][1], runs["b"][2]
    (table,) = loss_tables(summaries(runs), first="a", splits=["test"])
    assert table.heads[1] == "seeds"
    assert table.rows[0][:3] == ("a", "0, 1, 2", "2.6000 ± 0.2484")
    assert table.rows[1] == ("b", "0", "2.2000", "-0.3000", "one seed shows nothing")


def test_what_runs_take():
    table = cost_table(summaries(two_by_three()))
    assert table.rows == [
        ("a", "10", "40", "1,000–1,002", "2.0 s", "3.0 MiB"),
        ("b", "20", "40", "1,000–1,002", "2.0 s", "3.0 MiB"),
    ]


def test_every_run_by_seed():
    table = run_table({"a": {5: figures(2.0), 4: figures(1.5)}, "b": {4: figures(float("nan"))}}, splits=["validation"])
    assert [row[:3] for row in table.rows] == [("4", "a", "1.5000"), ("4", "b", "none"), ("5", "a", "2.0000")]


def test_markdown():
    table = cost_table(summaries({"a|b": {0: figures(1.0)}}))
    assert markdown(table).splitlines() == [
        f"{table.caption}:",
        "",
        "| configuration | steps | rows | tokens | time | memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| a\\|b | 10 | 40 | 1,000 | 2.0 s | 3.0 MiB |",
    ]
