"""A client's threads that do nothing by themselves."""

from types import SimpleNamespace


def see_done(work):
    if work.go_on(lambda awaited: None):
        work.after()


def kept_work(given):
    """Threads of a client that keep their work for the test."""
    return SimpleNamespace(
        expect=lambda work: None,
        start=given.append,
        start_asked=lambda work, awaited: given.append(work),
        publish=given.append,
        call=lambda callback: callback(),
        wake=lambda work: None,
    )
