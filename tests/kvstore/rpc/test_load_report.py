from kvstore.rpc.load_report import LoadReport, unpack_report


def test_a_report_comes_back_as_it_was_told():
    report = LoadReport(
        num_local=1, num_peer=2, reason="timeout: für 3 s", peers=["a", "b"], num_bytes=1 << 40, num_descriptors=5,
        read_s=0.25, num_locate_calls=6, num_lease_calls=7, note="no stage",
    )  # fmt: skip
    back = unpack_report(report.to_bytes())
    assert back == {name: getattr(report, name) for name in LoadReport.__slots__}


def test_nothing_comes_back_as_nothing():
    assert unpack_report(LoadReport().to_bytes())["peers"] == []


def test_texts_cannot_be_taken_for_others():
    back = unpack_report(LoadReport(reason="a\0b", note="c", peers=["d"]).to_bytes())
    assert (back["reason"], back["note"], back["peers"]) == ("a b", "c", ["d"])
