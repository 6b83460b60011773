"""A command of flash-tutorial, run in the tests' own process."""

from click.testing import CliRunner, Result

from flash_tutorial.cli import main


def call(*arguments) -> Result:
    """The result of a command: .exit_code, .stdout, .stderr, .output (both)."""
    result = CliRunner().invoke(main, [str(each) for each in arguments], prog_name="flash-tutorial")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments) -> str:
    """The message, as one line, of a command that must refuse its arguments: exit status 2, nothing on stdout."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())
