"""`python compare_runs.py RUN ...`: start model, PPO and GRPO over seeds, on the same prompts: a report, a verdict."""

from __future__ import annotations

from config import ComparisonConfig, parse_comparison_cli
from rlhf.errors import run_command


def main(argv: list[str] | None = None) -> None:
    config = parse_comparison_cli(argv)  # before torch is imported: --help and mistakes are answered at once
    from rlhf.console import Screen, quiet_libraries

    quiet_libraries()
    compare(config, Screen())


def compare(config: ComparisonConfig, screen) -> None:
    from pathlib import Path

    from rlhf.comparison_report import (
        check_sides,
        make_comparison,
        make_sides,
        show_comparison,
        tables,
        write_comparison,
    )
    from rlhf.curves import read_runs
    from rlhf.measuring import Bench
    from rlhf.preflight import start_device
    from rlhf.trained import find_models

    models = find_models(config.comparison.runs, config.measure, "RUN")
    check_sides(models)
    curves = read_runs([Path(name) for name in config.comparison.runs])
    bench = Bench(models, config.measure, start_device(screen), screen, start=True)
    screen.facts(bench.facts())
    start = bench.measure_start(screen)
    sides = make_sides(models, [bench.measure(model, screen) for model in models])
    report, verdict = make_comparison(bench, sides, start, curves)
    made = tables(report, sides)
    write_comparison(report, made, sides, start, curves, config.comparison.output, screen)
    show_comparison(report, verdict, made, screen)


if __name__ == "__main__":
    run_command(main)
