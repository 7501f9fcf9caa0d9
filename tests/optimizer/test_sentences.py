"""Messages about errors in the user's files."""

from pathlib import Path

import pytest
import torch

from optimize_export.errors import LoadError, Terminated
from optimize_export.wording import error_summary, quote
from optimizer.command.errors import errors_of_user_code


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def test_quotes_are_one_line_without_the_last_full_stop():
    assert quote(ValueError("one\n  two.")) == "one two"
    assert quote(ValueError("one"), with_type=True) == "ValueError: one"
    assert quote(ValueError()) == quote(ValueError(), with_type=True) == "ValueError"
    assert quote(ValueError("x" * 1000)).endswith("x…")
    interpreter = (
        "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:\n a\nError: no.\n"
    )
    assert quote(RuntimeError(interpreter)) == "Error: no"


@pytest.mark.parametrize(
    ("message", "summary"),
    [
        ("X could not be resolved. At\n  File 'net.py', line 10", "X could not be resolved"),
        ("Sizes don't match:\n  3 and 4", "Sizes don't match: 3 and 4"),
        ("no.\nmore", "no"),
        ("The following operation failed in the TorchScript interpreter.\nTraceback:\nno", "no"),
    ],
)
def test_a_summary_ends_before_words_that_belong_to_the_next_line(message, summary):
    assert error_summary(ValueError(message)) == f"ValueError: {summary}"


def test_an_error_that_cant_say_what_it_is_is_quoted_by_its_class():
    assert quote(Speechless(), with_type=True) == "Speechless"


def test_a_lack_of_memory_is_told_with_what_was_asked_for():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert quote(caught.value, with_type=True) == ("out of memory while allocating 33,554,432.0 GiB")
    assert quote(MemoryError(), with_type=True) == "out of memory"
    assert quote(torch.OutOfMemoryError("CUDA out of memory. Tried")) == "out of GPU memory"
    assert quote(ValueError("can't allocate memory: you tried to allocate 3 bytes")).startswith("can't allocate")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated(), LoadError("as it is")])
def test_what_stops_the_program_and_what_is_a_sentence_already_go_through(error):
    with pytest.raises(type(error)) as caught, errors_of_user_code("m.py failed", Path("/nowhere")):
        raise error
    assert caught.value is error
