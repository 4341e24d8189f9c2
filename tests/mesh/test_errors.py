"""Errors that go no further."""

from sealring.mesh.errors import InvalidInput, forget_frames


def test_an_error_that_goes_no_further_holds_no_frames() -> None:
    """Nor do the errors that it came from, which may come from each other."""
    met: list[BaseException] = []
    try:
        try:
            raise ExceptionGroup("several", [raised(ValueError()), raised(KeyError())])
        except ExceptionGroup as group:
            met += [group, *group.exceptions]
            raise InvalidInput("wrong") from group
    except InvalidInput as error:
        met.append(error)
        met[1].__context__ = error
        forget_frames(error)
    assert [each.__traceback__ for each in met] == [None] * 4


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught
