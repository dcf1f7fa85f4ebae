from lit_effattn.analysis.tables import Spread, Table, comma_separated, markdown, shown


def test_numbers_for_readers():
    for value, text in (
        *[(None, ""), (True, "True"), ("1e5", "1e5"), (12345, "12,345"), (2**60, "1,152,921,504,606,846,976")],
        *[(0.000123456, "0.0001235"), (9999.4, "9999"), (415756.0, "415,756"), (-20000.6, "-20,001"), (1e20, "1e+20")],
        *[(float("nan"), "nan"), (float("inf"), "inf"), (Spread(1.23456, 0.0123), "1.235 ± 0.012")],
        (Spread(70000.0, None), "70,000"),
    ):
        assert shown(value) == text


def test_text_of_others_is_no_formula_and_no_html():
    hostile = [
        "=cmd|'/c calc'!A0",
        "+1+1",
        "@SUM(A1)",
        "-2+3",
        "<img src=x>",
        "![x](http://host/x)",
        "a\x1b[2Jb",
        "-1.5",
        "1e-3",
    ]
    table = Table("Runs", ["name"], [[text] for text in hostile])
    assert comma_separated(table).splitlines()[1:5] == ["'=cmd|'/c calc'!A0", "'+1+1", "'@SUM(A1)", "'-2+3"]
    assert comma_separated(table).splitlines()[-3:] == ["a\\x1b[2Jb", "-1.5", "1e-3"]
    assert "&lt;img src=x&gt;" in markdown(table)
    assert "](" not in markdown(table)
