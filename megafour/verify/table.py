"""What a verification shows: a line as soon as a mesh has ended, or one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from megafour.sizes import TOY
from megafour.verify.compare import Tolerance
from megafour.verify.full import Skipped
from megafour.verify.run import Outcome
from megafour.verify.shrink import Case


class Table:
    """Prints its head when made, then a line for each mesh."""

    def __init__(self, cases: Sequence[Case], steps: int, precision: str, device: str, tolerance: Tolerance,
                 out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.width = max(len("mesh"), *(len(case.degrees.words) for case in cases))
        resumed = [case.resumed[0].words for case in cases if case.resumed is not None]
        self.resumed = max(len(words) for words in ("resumed on", *resumed))
        m, seq = cases[0].config.model, cases[0].config.data.seq_length
        size = "toy" if cases[0].sizes == TOY else "full size"
        self._print(f"{size}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} query and "
                    f"{m.kv_heads} K/V heads, sequence {seq}; {steps} steps in {precision} on {device}"
                    + ("; sizes differ by row" if cases[0].options else ""))
        if cases[0].thorough:
            self._print("each mesh trains, skips a step whose gradient is not finite, evaluates and saves; another "
                        "mesh resumes, and one process generates")
        self._print(f"passes at: loss and evaluation {tolerance.loss:g}, gradient norm {tolerance.grad_norm:g}, "
                    f"gradients and moments {tolerance.gradient:g}, weights and text {tolerance.weights:g}")
        self._print(f"{'mesh':{self.width}}  {'resumed on':{self.resumed}}"
                    + "".join(f"  {name:>7}" for name in ("loss", "norm", "grad", "weights", "moments", "eval", "text"))
                    + "  result  seconds  worst gradient")

    def row(self, outcome: Outcome) -> None:
        """One mesh."""
        numbers = (outcome.loss, outcome.grad_norm, outcome.gradient, outcome.weights, outcome.moments,
                   outcome.evaluation, outcome.generation)
        shown = "  ".join(f"{'–' if x is None else f'{x:.1e}':>7}" for x in numbers)
        meshes = f"{outcome.mesh:{self.width}}  {outcome.resumed_on or '–':{self.resumed}}"
        verdict = f"{'pass' if outcome.passed else 'FAIL':6}  {outcome.seconds:7.1f}  {outcome.worst_gradient or ''}"
        self._print(f"{meshes}  {shown}  {verdict}".rstrip())
        if outcome.options:
            self._print(" " * self.width + "  " + " ".join(f"{k}={v}" for k, v in outcome.options.items()))
        if outcome.error:
            self._print(" " * self.width + "  " + outcome.error)

    def end(self, outcomes: Sequence[Outcome], skipped: Sequence[Skipped] = ()) -> None:
        """The meshes that were skipped, and the last line."""
        for one in skipped:
            self._print(f"skipped: {one.why}")
        passed = sum(outcome.passed for outcome in outcomes)
        seconds = sum(outcome.seconds for outcome in outcomes)
        same = f"every mesh that ran is the same model, {len(skipped)} skipped" if skipped else (
            "every mesh is the same model")
        verdict = same if passed == len(outcomes) else f"{len(outcomes) - passed} FAILED"
        self._print(f"{passed} of {len(outcomes)} passed in {seconds:.0f} s: {verdict}")

    def _print(self, line: str) -> None:
        print(line, file=self.out, flush=True)


def as_json(outcomes: Sequence[Outcome], steps: int, precision: str, device: str,
            tolerance: Tolerance, skipped: Sequence[Skipped] = ()) -> dict[str, Any]:
    """The document of `--json`; a deviation that is not a number is text, since JSON has no NaN."""
    return {"passed": all(outcome.passed for outcome in outcomes), "steps": steps, "dtype": precision, "device": device,
            "tolerance": asdict(tolerance), "meshes": [_plain(asdict(outcome)) for outcome in outcomes],
            "skipped": [asdict(one) for one in skipped]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value
