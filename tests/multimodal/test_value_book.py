"""The bounded book that P0 keeps beside the keys: what it holds, in which order it lets go, and what it counts."""

from shmstore.multimodal.updates_book import ValueBook


def book_of(capacity, **sizes):
    book = ValueBook(capacity)
    for key, size in sizes.items():
        book.put(key, key.upper(), size)
    return book


def held(book):
    return {key for key in "abcdefg" if key in book}


def test_the_least_recently_used_go_first_and_no_more_of_them_than_have_to():
    book = book_of(6, a=2, b=2, c=2)
    assert ("A", 2) == book.use("a")
    book.put("d", "D", 3)
    assert (set("ad"), 5, 2) == (held(book), book.nbytes, len(book))


def test_looking_is_no_use():
    book = book_of(6, a=2, b=2, c=2)
    assert ("A", None, None) == (book.peek("a"), book.peek("x"), book.use("x"))
    assert "a" in book
    book.put("d", "D", 1)
    assert set("bcd") == held(book)


def test_a_value_that_is_replaced_or_dropped_takes_its_size_along():
    book = book_of(6, a=2, b=2)
    book.put("a", "AA", 4)
    assert (set("ab"), 6, "AA") == (held(book), book.nbytes, book.peek("a"))
    book.drop("a")
    book.drop("a")
    assert (set("b"), 2) == (held(book), book.nbytes)
    book.put("c", "C", 4)
    assert (set("bc"), 6) == (held(book), book.nbytes)


def test_a_value_that_is_replaced_counts_as_used():
    book = book_of(6, a=2, b=2, c=2)
    book.put("a", "A", 2)
    book.put("d", "D", 2)
    assert set("acd") == held(book)


def test_a_value_larger_than_the_book_is_not_kept_and_nothing_goes_for_it_but_its_older_self():
    book = book_of(6, a=2, b=2)
    book.put("c", "C", 7)
    assert (set("ab"), 4) == (held(book), book.nbytes)
    book.put("a", "A", 7)
    assert (set("b"), 2) == (held(book), book.nbytes)
    book.put("d", "D", 6)
    assert (set("d"), 6) == (held(book), book.nbytes)


def test_after_clear_there_is_all_the_room():
    book = book_of(6, a=2, b=4)
    book.clear()
    assert (set(), 0, 0) == (held(book), book.nbytes, len(book))
    book.put("c", "C", 6)
    book.put("d", "D", 0)
    assert set("cd") == held(book)
