"""Writes ``docs/explanation/simulator-gallery.md`` and its pictures: every shipped scenario, run as it is.

``python tools/sim_gallery.py [NAME …]`` runs all of them, or those that are named and keeps the rest; some minutes.
What is learned from each is written here, with ``{variant:figure}`` where a figure of the run belongs, so that no text
tells what a table does not.
"""

import contextlib
import io
import re
import sys
import tomllib
from pathlib import Path

from modelyard.cli.sim_output import Asked, show
from modelyard.cli.sim_pictures import draw
from modelyard.sim import examples
from modelyard.sim.results import Results
from modelyard.sim.scenarios import run, scenario_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "simulator-gallery.md"
PICTURES = PAGE.with_suffix("")
PICTURE_BYTES_MAX = 60_000
_PLACE = re.compile(r"\{([^:{}]+):([^{}]+)\}")

INTRODUCTION = """# A gallery of simulations

<!-- Written by tools/sim_gallery.py: do not edit. -->

Every scenario that comes with Modelyard, its table as it is printed and what it shows. `modelyard sim NAME` prints the
same, `modelyard sim examples show NAME > mine.toml` is a file to begin one's own with, and
[Simulate](../how-to/simulate.md) says what may be in it. Pictures show the first seed. Speeds are rooflines where a
file gives no others, so that what two columns are to each other is worth more than either.
"""

LESSONS = {
    "laptop": """A CPU reads a prompt about as slowly as it writes, so that the part of each prompt that is the same in
all is worth caching: first tokens come after {prefix cached:ttft_p50_s} at the median, and after {no cache:ttft_p50_s}
without. Two slots answer faster once they have begun, and let more wait. With twice the callers
{twice the callers:within} get their first token in time, beside {prefix cached:within}.""",
    "chat": """Of the tokens of prompts {as shipped:hit_rate} are cached where the gateway sends a turn to where its
conversation lies, {routed by load alone:hit_rate} where it goes by load alone: with four replicas a turn then finds its
conversation by chance, and the system prompt nearly always. The first token's p99 is {as shipped:ttft_p99_s},
{routed by load alone:ttft_p99_s} and {nothing cached:ttft_p99_s}.""",
    "canary": """Callers of the stable version notice nothing ({as fast:version[stable].ttft_p99_s} and
{twice as slow:version[stable].ttft_p99_s} at p99): each version has replicas of its own. Of the canary's
{twice as slow:version[canary].within} have their first token within a second. A second replica helps
({slow, two replicas:version[canary].within}), and cannot make an engine faster that is slow by itself.""",
    "scale-to-zero": """Asleep after five minutes it costs {5 min:usd_per_hour} an hour instead of
{one stays:usd_per_hour}, and {5 min:within} of requests have their first token in time: those of a burst's first minute
wait for the load. Thirty minutes answer more in time ({30 min:within}) for {30 min:usd_per_hour}, and the learned idle
time most ({learned:within}) for {learned:usd_per_hour}.""",
    "noisy-neighbour": """The flood is refused {beside a flood:tenant[flood].refused} of what it sends, the quiet tenant
{beside a flood:tenant[quiet].refused}; {beside a flood:tenant[quiet].within} of its requests are in time though the
replicas are always full. But nobody is put out whose caller has begun to read: it waits for a slot, and its p99 is
{beside a flood:tenant[quiet].ttft_p99_s} instead of {alone:ttft_p99_s}. The priority plan brings that to
{quiet has the priority plan:tenant[quiet].ttft_p99_s}, and twice the replicas to
{four replicas:tenant[quiet].ttft_p99_s}, where slots become free twice as often.""",
    "how-many": """One is far too few: {1:refused} are refused and {1:within} are in time. Two are enough
({2:within}); a third makes tokens come faster ({2:tpot_p50_s} to {3:tpot_p50_s}) and costs
{3:usd_per_million} instead of {2:usd_per_million} for a million of them.""",
    "which-gpu": """The L4 has the cheapest hour and cannot carry the load: {L4:refused} are refused, and what it serves
costs {L4:usd_per_million} a million tokens. The L40S is the cheapest that can ({L40S:usd_per_million}); the H100 is the
fastest ({H100:tpot_p50_s} a token beside {L40S:tpot_p50_s}) and costs {H100:usd_per_million}, as so few requests leave
most of its batch empty.""",
    "office-day": """Autoscaling as shipped needs {as shipped:replicas_mean} replicas on average instead of three, and
{as shipped:within} of first tokens are in time. Giving back earlier saves more ({given back earlier:replicas_mean}) and
some callers feel it: first tokens come after {given back earlier:ttft_p99_s} at p99 beside {as shipped:ttft_p99_s}, and
{given back earlier:cold_starts} replicas are started instead of {as shipped:cold_starts}.""",
    "spot": """An hour costs {half of them:usd_per_hour} instead of {none is spot:usd_per_hour}, since nearly all
replicas are beyond an endpoint's first. {half of them:reclaimed} nodes were taken back, and
{half, and hourly:reclaimed} where that happens hourly; {half, and hourly:available} of requests were answered all the
same, as replicas drain within the notice. What it takes is starts: {half, and hourly:starts} instead of
{none is spot:starts}.""",
    "lora-pool": """Adapters that share the replicas of their base need {adapters share:gpu_hours} accelerator hours,
merged copies that sleep {a copy each, asleep:gpu_hours}, copies that stay awake {a copy each, awake:gpu_hours}. The
first have fewer cold starts as well ({adapters share:activations} instead of
{a copy each, asleep:activations}): a base that dozens of endpoints share is awake for all of them.""",
    "batches": """On what is idle {on what is idle:batch_done} of the lines are done without accelerators of their own,
and the first token's p99 stays ({on what is idle:ttft_p99_s}, {on their own:ttft_p99_s}). On their own they take
{on their own:batch_gpu_hours} accelerator hours. With three times as many lines accelerators are busy for
{three times as many:total_busy} of their time instead of {on what is idle:total_busy}.""",
}


def section(name: str) -> str:
    """Run a scenario, write its picture and return its part of the page."""
    text = examples.text(name)
    results = run(scenario_of(tomllib.loads(text), examples.FOLDER))
    picture = draw(results)["overview"]
    assert len(picture) <= PICTURE_BYTES_MAX, f"the picture of {name} has {len(picture):,} bytes"
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{name}.svg").write_text(picture, "utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(results, Asked())
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    story, _, shows = comment.partition(" Shows: ")
    parts = [
        f"## {examples.title(name)}",
        story,
        f"*Shows:* {shows}",
        f"```text\n$ modelyard sim {name}\n{printed.getvalue().rstrip()}\n```",
        f"![{examples.title(name)}](simulator-gallery/{name}.svg)",
        filled(LESSONS[name], results),
    ]
    return "\n\n".join(parts)


def filled(lesson: str, results: Results) -> str:
    """Return a lesson with the figures of the run."""
    figures = {figure.key: figure for figure in results.figures}

    def value(found: re.Match[str]) -> str:
        tried = next(one for one in results.tried if one.name == " ".join(found[1].split()))
        figure, mean = figures[found[2]], tried.mean(found[2])
        assert mean is not None, f"{found[0]} was not measured"
        return written(mean, figure.unit)

    return _PLACE.sub(value, lesson)


def written(value: float, unit: str) -> str:
    """Return a figure in a sentence."""
    match unit:
        case "share":
            return f"{100 * value:.3g} %" if value < 0.999 or value == 1 else f"{100 * value:.3f} %"
        case "s":
            return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.3g} s"
        case "usd":
            return f"${value:,.2f}"
        case _:
            return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main(names: list[str]) -> int:
    """Write the page."""
    kept = {}
    if names and PAGE.exists():
        for part in PAGE.read_text("utf-8").split("\n## ")[1:]:
            name = re.search(r"\$ modelyard sim (\S+)", part)
            if name is not None:
                kept[name[1]] = f"## {part.rstrip()}"
    order = [*LESSONS, *(name for name in examples.names() if name not in LESSONS)]
    parts = [kept[name] if name in kept and name not in names else section(name) for name in order]
    PAGE.write_text("\n\n".join([INTRODUCTION.rstrip(), *parts]) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
