"""The benchmarks that need a GPU say so where there is none."""

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu_beside, gpu_rows
from benchmarks.studies import gpu_bounds, gpu_scatter, gpu_strips


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(click.ClickException, match="wanted a CUDA device"):
        gpu_rows.print_rows([("part", lambda: pytest.fail("measured"))], as_json=True)


@pytest.mark.parametrize(
    ("benchmark", "rounds", "most"),
    [(gpu_beside, 30, 1000), (gpu_bounds, 15, 100), (gpu_scatter, 15, 100), (gpu_strips, 21, 100)],
)
def test_their_commands_have_a_help_text_and_their_own_number_of_rounds(monkeypatch, benchmark, rounds, most):
    shown = CliRunner().invoke(benchmark.main, ["--help"])
    assert shown.exit_code == 0
    assert f"[default: {rounds}; 1<=x<={most}]" in shown.output
    assert benchmark.__doc__.split()[0] in shown.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = CliRunner().invoke(benchmark.main, ["--rounds", "2", "--json"])
    assert refused.exit_code == 1
    assert "wanted a CUDA device" in refused.output


def test_a_command_measures_as_many_rounds_as_it_is_told(monkeypatch):
    monkeypatch.setattr(gpu_rows, "print_rows", lambda parts, as_json: click.echo(f"{list(parts)} {as_json}"))
    command = gpu_rows.rows_command("text", lambda rounds: [("part", rounds)], rounds=4)
    assert CliRunner().invoke(command, []).output == "[('part', 4)] False\n"
    assert CliRunner().invoke(command, ["--rounds", "9", "--json"]).output == "[('part', 9)] True\n"
