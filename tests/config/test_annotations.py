from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional, Protocol, TypeAlias

import pytest

from lra.annotations import Instance, mismatch, nearest, parameters

PerLayer: TypeAlias = int | tuple[int, ...]


class Animal:
    pass


class Dog(Animal):
    pass


class Cat(Animal):
    pass


class Schedule:
    def __call__(self, step: int) -> float:
        return step / 2


class Shape(Protocol):
    def area(self) -> float: ...


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (3, int),
        (3, float),
        (0.5, float),
        (True, bool),
        ("a", str),
        (None, None),
        (None, Optional[int]),  # noqa: UP045 - the old spelling is what is tested
        (3, int | None),
        (3, PerLayer),
        ((1, 2, 3), PerLayer),
        ((), tuple[int, ...]),
        ((4, "x"), tuple[int, str]),
        (((4, Dog), (2, Animal)), tuple[tuple[int, type[Animal]], ...]),
        ([1, 2], list[int]),
        ([1, 2], Sequence[int]),
        ((1, 2), Sequence[int]),
        ({"a": 1}, dict[str, int]),
        ({"a": Dog}, Mapping[str, type[Animal]]),
        ("cosine", Literal["cosine", "constant"]),
        (Dog, type),
        (Dog, type[Animal]),
        (Dog, Callable[..., Animal]),
        (Dog, Callable),
        (Instance(Schedule), Callable[[int], float]),
        (Instance(Dog), Animal),
        (Instance(Dog), Shape),
        (Dog, type[Shape]),
        (object(), Any),
        ("anything", object),
    ],
)
def test_fits(value, annotation):
    assert mismatch(value, annotation) is None


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (1e5, int, "needs int, got 100000.0 (float): write 100_000"),
        (1.5, int, "needs int, got 1.5 (float)"),
        (True, int, "needs int, got True (bool)"),
        (True, float, "needs float, got True (bool)"),
        (1, bool, "needs bool, got 1 (int)"),
        ("64", int, "needs int, got '64' (str): write 64"),
        ("many", int, "needs int, got 'many' (str)"),
        (None, int, "needs int, got None"),
        (1e3, int | None, "needs int | None, got 1000.0 (float): write 1_000"),
        ((1, 2.0), PerLayer, "needs int at [1], got 2.0 (float): write 2"),
        (4, tuple[int, ...], "needs tuple[int, ...], got 4 (int): write (4,)"),
        ([1, 2], tuple[int, ...], "needs tuple[int, ...], got [1, 2] (list): write (1, 2)"),
        ((1, 2, 3), tuple[int, int], "needs tuple[int, int], got (1, 2, 3) of length 3"),
        (
            ((4, Dog), (2, Schedule)),
            tuple[tuple[int, type[Animal]], ...],
            "needs type[Animal] at [1][1], got @Schedule (a class)",
        ),
        ({"a": 1.0}, dict[str, int], "needs int at ['a'], got 1.0 (float): write 1"),
        ({1: 1}, Mapping[str, int], "needs str at key 1, got 1 (int)"),
        ("abc", Sequence[str], "needs Sequence[str], got 'abc' (str): write ('abc',)"),
        (
            "cosin",
            Literal["cosine", "constant"],
            "needs one of 'cosine', 'constant', got 'cosin' (str): did you mean 'cosine'?",
        ),
        (Instance(Dog), type[Animal], "needs type[Animal], got @Dog() (an instance): write @Dog"),
        (Dog, Animal, "needs Animal, got @Dog (a class): write @Dog()"),
        (Schedule, type[Animal], "needs type[Animal], got @Schedule (a class)"),
        (Cat, Callable[..., Dog], "needs Callable[..., Dog], got @Cat (a class)"),
        (Instance(Dog), Callable[[int], float], "needs Callable[[int], float], got @Dog() (an instance)"),
        (3, Shape, "needs Shape, got 3 (int)"),
    ],
)
def test_misfits_name_what_is_needed_what_came_and_the_remedy(value, annotation, message):
    assert mismatch(value, annotation) == message


def test_an_annotation_of_an_unknown_kind_is_refused():
    with pytest.raises(TypeError, match="cannot check"):
        mismatch(3, "int")


def test_parameters_resolve_strings_and_leave_out_self_and_variadics():
    class Named:
        def __init__(self, a: "int | None", *args: int, b: "Literal['x']" = "x", **kwargs: int) -> None: ...

    found = parameters(Named)
    assert {name: p.annotation for name, p in found.items()} == {"a": int | None, "b": Literal["x"]}
    assert found["b"].default == "x"


def test_parameters_of_dataclasses_and_of_classes_without_a_constructor():
    @dataclass
    class Data:
        size: "int" = 3

    assert parameters(Data)["size"].annotation is int
    assert parameters(Animal) == {}


def test_parameters_that_cannot_be_resolved_are_a_fault_of_the_program():
    class Lost:
        def __init__(self, a: "NowhereDefined") -> None: ...  # noqa: F821

    with pytest.raises(TypeError, match=r"Lost.__init__ has an annotation that cannot be resolved: .*NowhereDefined"):
        parameters(Lost)


def test_nearest():
    assert nearest("widow", ["window", "chunk"]) == "did you mean window?"
    assert nearest("zzz", ["window", "chunk"]) == "there are chunk, window"
    assert nearest("zzz", []) == "there are none"
