import threading

from kvstore.runtime.latch import Latch


def test_a_latch_is_waited_for_until_it_is_set_and_then_no_more():
    latch = Latch()
    assert not latch.is_set()
    assert not latch.wait(0)
    assert not latch.wait(0.01)
    latch.set()
    assert latch.is_set()
    assert latch.wait(0)
    latch.set()
    assert latch.wait(0)


def test_all_who_wait_are_let_go_by_one_of_many():
    def race(latch, let_go):
        waiting = [threading.Thread(target=lambda: let_go.append(latch.wait(10))) for _ in range(4)]
        setting = [threading.Thread(target=latch.set) for _ in range(3)]
        for thread in waiting + setting:
            thread.start()
        for thread in waiting + setting:
            thread.join(10)

    for _ in range(50):
        let_go = []
        race(Latch(), let_go)
        assert let_go == [True] * 4
