"""The page itself: table, curves, pictures, and what the figures rest on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from aha.evaluation.collect import Collected
from aha.evaluation.explainers import short_labels
from aha.evaluation.report.figures import curve_figure, scatter_figure
from aha.evaluation.report.gallery import choose, load_pictures, map_address, picture_address
from aha.evaluation.results import ARROWS, differs, is_best
from aha.evaluation.runner import MAPS, Run

HARD_SHOWN = 12
BETTER = {True: "higher is better ↑", False: "lower is better ↓"}


def report_html(run: Run, collected: Collected, results: dict[str, Any], hard: Sequence[dict[str, Any]]) -> str:
    """The report as one HTML file that needs nothing else.

    Args:
        run: what was evaluated.
        collected: its figures per sample.
        results: what ``results.json`` holds.
        hard: the hard samples.
    """
    labels = [entry.label for entry in run.entries]
    names = short_labels(labels)
    cells = {(row["explainer"], row["protocol"], row["metric"]): row for row in results["rows"]}
    sections = [
        _header(run, results),
        _verdict(collected, cells, labels, names),
        _controls(names),
        _table(collected, results, cells, labels, names),
        _curves(run, collected, labels, names),
        _cost(collected, cells, labels, names),
        _gallery(run, collected, labels, names),
        _hard(hard, run),
        _basis(results),
    ]
    files = resources.files("aha.evaluation.report")
    style, script = ((files / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    title = f"Explainers of {run.classifier.name} on {run.samples.name}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>"
        f"{''.join(sections)}<script>{script}</script></body></html>\n"
    )


def _header(run: Run, results: dict[str, Any]) -> str:
    data, accuracy = results["data"], results["data"]["accuracy"]
    facts = [f"{data['evaluated']} of {data['samples']} pictures"]
    if accuracy is not None:
        facts.append(f"classifier {accuracy:.1%} accurate")
    facts += [f"explains the {run.target} class", f"weights {run.classifier.fingerprint()[:10]}", f"seed {run.seed}"]
    return (
        '<header><div><p class="kicker">Which explanation is faithful?</p>'
        f"<h1>{escape(run.classifier.name)} <span>on {escape(run.samples.name)}</span></h1>"
        f'<p class="facts">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</p></div>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">◐</button></header><main>'
    )


def _verdict(collected: Collected, cells: dict, labels: list[str], names: list[str]) -> str:
    protocol, metric = collected.headline()
    first = cells[labels[0], protocol, metric]
    if first["value"] is None:
        return f'<p class="verdict">{escape(names[0])} has no {_words(metric)} on this data.</p>'
    sign = 1 if first["higher_is_better"] else -1
    ahead, level, behind = [], [], []
    for label, name in zip(labels[1:], names[1:], strict=True):
        row = cells[label, protocol, metric]
        if row["difference"] is None:
            continue
        group = level if not differs(row) else (behind if sign * row["difference"] > 0 else ahead)
        group.append(f"{escape(name)} by {abs(row['difference']):.3f}")
    text = (
        f"<b>{escape(names[0])}</b>: {_words(metric)} <b>{first['value']:.3f}</b> "
        f"[{first['low']:.3f}, {first['high']:.3f}] under protocol <b>{protocol}</b>"
    )
    said = [f"ahead of {_join(ahead)}"] if ahead else []
    said += [f"behind {_join(behind)}"] if behind else []
    said += [f"not told apart from {_join([part.rsplit(' by ', 1)[0] for part in level])}"] if level else []
    return f'<p class="verdict">{text}{"; " if said else ""}{"; ".join(said)}.</p>'


def _controls(names: list[str]) -> str:
    chips = "".join(
        f'<button type="button" class="chip s{i % 10}" data-explainer="{i}" aria-pressed="true">'
        f"<i></i>{escape(name)}</button>"
        for i, name in enumerate(names)
    )
    return f'<nav class="chips" aria-label="Explainers shown in figures and pictures">{chips}</nav>'


def _table(collected: Collected, results: dict[str, Any], cells: dict, labels: list[str], names: list[str]) -> str:
    groups: dict[str, list[str]] = {}
    for protocol, metric in collected.directions:
        groups.setdefault(protocol, []).append(metric)
    about = {entry["explainer"]: entry for entry in results["explainers"]}
    top = "".join(
        f'<th colspan="{len(metrics)}" scope="colgroup">{"map alone" if p == MAPS else escape(p)}</th>'
        for p, metrics in groups.items()
    )
    second = "".join(_column_head(metric, collected.directions[p, metric]) for p, ms in groups.items() for metric in ms)
    body = []
    for i, (label, name) in enumerate(zip(labels, names, strict=True)):
        figures = []
        for p, metrics in groups.items():
            for k, metric in enumerate(metrics):
                row = cells[label, p, metric]
                best = is_best(row, [cells[other, p, metric] for other in labels])
                figures.append(_cell(row, best, edge=k == 0))
        entry = about[label]
        seconds, forwards = entry["seconds_per_image"], entry["classifier_forwards_per_image"]
        cost = "".join(
            f'<td class="{edge}">{"–" if value is None else f"{value:{form}}"}</td>'
            for value, form, edge in ((seconds and seconds * 1e3, ".3g", "edge"), (forwards, ".4g", ""))
        )
        body.append(
            f'<tr><th scope="row" title="{escape(label)}"><i class="dot s{i % 10}"></i>{_breakable(name)}</th>'
            f"{''.join(figures)}{cost}</tr>"
        )
    return (
        '<section><div class="row"><h2>Figures</h2><button type="button" id="differences" aria-pressed="false">'
        f"Show differences to {escape(names[0])}</button></div>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of figures"><table>'
        f'<thead><tr><th rowspan="2" scope="col">explainer</th>{top}<th colspan="2" scope="colgroup">cost</th></tr>'
        f'<tr>{second}<th scope="col">ms per image</th><th scope="col">forwards</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        '<p class="note">Small figures: 95 % bootstrap interval of the mean. Shaded: best of its column. '
        f"▲ better, ▼ worse than {escape(names[0])} where the paired interval excludes zero. Cost of one map, in "
        f"batches of {results['batch_size']} on {escape(results['classifier']['device'])}; forwards are pictures "
        "that the explainer shows the classifier.</p></section>"
    )


def _column_head(metric: str, higher: bool) -> str:
    words = _words(metric).replace(" −", "&nbsp;−")
    return f'<th scope="col">{words}&nbsp;<span title="{BETTER[higher]}">{ARROWS[higher]}</span></th>'


def _cell(row: dict[str, Any], best: bool, *, edge: bool) -> str:
    kinds = " ".join(kind for kind, on in (("best", best), ("edge", edge)) if on)
    if row["value"] is None:
        return f'<td class="{kinds}" title="no figure: {row["excluded"]} excluded">–</td>'
    mark, difference = "", '<span class="diff">–</span>'
    if row["difference"] is not None:
        if differs(row):
            better = (row["difference"] > 0) == row["higher_is_better"]
            word = "better" if better else "worse"
            mark = f'<span class="{word}" title="{word}">{"▲" if better else "▼"}</span>'
        ends = f"{row['difference_low']:+.3f} {row['difference_high']:+.3f}"
        difference = f'<span class="diff">{row["difference"]:+.3f}{mark}<small>{ends}</small></span>'
    title = f"n = {row['n']}" + (f", {row['excluded']} excluded" if row["excluded"] else "")
    value = f"{row['value']:.3f}{mark}<small>{_bare(row['low'])} {_bare(row['high'])}</small>"
    return f'<td class="{kinds}" title="{title}"><span class="value">{value}</span>{difference}</td>'


def _curves(run: Run, collected: Collected, labels: list[str], names: list[str]) -> str:
    parts = []
    for protocol in run.protocols:
        figures = []
        for metric, higher in protocol.metrics.items():
            curves = [collected.curves.get((label, protocol.name, metric)) for label in labels]
            if any(curves):
                figures.append(curve_figure(curves, names, _words(metric), BETTER[higher]))
        if figures:
            scored = "accuracy" if protocol.score == "accuracy" else "probability"
            parts.append(
                f'<div class="protocol"><h3>{escape(protocol.name)} <span>{scored}</span></h3>{"".join(figures)}</div>'
            )
    note = '<p class="note">Mean over samples with its 95 % band (1.96 standard errors).</p>'
    return f'<section><h2>Curves</h2><div class="protocols">{"".join(parts)}</div>{note}</section>' if parts else ""


def _cost(collected: Collected, cells: dict, labels: list[str], names: list[str]) -> str:
    protocol, metric = collected.headline()
    rows = [cells[label, protocol, metric] for label in labels]
    seconds = [collected.seconds[label] for label in labels]
    title = f"{_words(metric)} ({protocol}) against time per image"
    figure = scatter_figure(seconds, rows, names, title, BETTER[collected.directions[protocol, metric]])
    return f'<section><h2>What faithfulness costs</h2><div class="figures">{figure}</div></section>' if figure else ""


def _gallery(run: Run, collected: Collected, labels: list[str], names: list[str]) -> str:
    groups = choose(collected, labels)
    if not groups:
        return ""
    pictures = load_pictures(run.samples, [key for group in groups for key in group.keys])
    protocol, metric = collected.headline()
    place = {key: i for i, key in enumerate(collected.keys)}
    parts = []
    for group in groups:
        cards = []
        for key in group.keys:
            if key not in pictures:
                continue
            height, width = pictures[key].shape[:2]
            figures = [
                f'<figure class="cell picture"><div class="stack"></div><figcaption>{_about(run, collected, key)}'
                "</figcaption></figure>"
            ]
            for i, (label, name) in enumerate(zip(labels, names, strict=True)):
                value = collected.columns[label, protocol, metric][place[key]]
                score = "excluded" if value != value else f"{value:.3f}"
                figures.append(
                    f'<figure class="cell" data-explainer="{i}"><button type="button" class="stack" '
                    f'aria-label="Enlarge {escape(name)}"><img class="map" alt="" loading="lazy" '
                    f'src="{map_address(collected.maps[label, key])}"></button>'
                    f'<figcaption><i class="dot s{i % 10}"></i>{_breakable(name)} <b>{score}</b></figcaption></figure>'
                )
            cards.append(
                f'<article style="--picture:url({picture_address(pictures[key])});--ratio:{width}/{height};'
                f'--count:{len(labels) + 1}" '
                f'aria-label="{escape(key)}">{"".join(figures)}</article>'
            )
        parts.append(f"<h3>{group.title} <span>{escape(group.about)}</span></h3>{''.join(cards)}")
    words = _words(metric)
    return (
        '<section id="pictures"><h2>Pictures</h2><div class="strength"><label for="strength">Overlay</label>'
        '<input type="range" id="strength" min="0" max="100" value="75" step="5"><output for="strength">75 %</output>'
        '<span class="legend"><span>against</span><i></i><span>for the class</span></span></div>'
        f'<p class="note">Under each picture: {words} under protocol {escape(protocol)}. Every map has its own scale, '
        "symmetric about zero; a map of one sign is drawn from its minimum. Select a picture to enlarge it; arrow keys "
        f"step through the explainers.</p>{''.join(parts)}</section>"
        '<dialog id="large" aria-label="Enlarged picture"><form method="dialog"><button aria-label="Close">✕</button>'
        '</form><div class="hold"></div></dialog>'
    )


def _about(run: Run, collected: Collected, key: str) -> str:
    sample, classes = collected.samples[key], run.classifier.class_names

    def called(index: int) -> str:
        return escape(classes[index]) if classes else f"class {index}"

    said = f"<b>{called(sample['target'])}</b> {sample['probability']:.0%}"
    if sample["label"] >= 0 and sample["label"] != sample["predicted"]:
        said += f' <span class="worse">label {called(sample["label"])}</span>'
    return f'<span class="key" title="{escape(key)}">{escape(key)}</span>{said}'


def _hard(hard: Sequence[dict[str, Any]], run: Run) -> str:
    if not hard:
        return ""
    rows = "".join(
        f'<tr><td>{sample["rank"]}</td><th scope="row" class="key">{escape(sample["key"])}</th>'
        f"<td>{'–' if sample['score'] != sample['score'] else format(sample['score'], '.3f')}</td>"
        f"<td>{sample['probability']:.2f}</td><td>{sample['margin']:.2f}</td>"
        f'<td class="text">{escape(", ".join(sample["reasons"]))}</td></tr>'
        for sample in hard[:HARD_SHOWN]
    )
    more = f" The first {HARD_SHOWN} of {len(hard)}." if len(hard) > HARD_SHOWN else ""
    return (
        f"<section><h2>Hard samples</h2><p class='note'>Where {escape(run.entries[0].label)} or the classifier does "
        f"badly.{more} All are in <code>hard.csv</code>; <code>--only hard.csv</code> evaluates them alone.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Hard samples"><table class="plain"><thead><tr>'
        '<th scope="col">rank</th><th scope="col">sample</th><th scope="col">score</th><th scope="col">probability</th>'
        '<th scope="col">margin</th><th scope="col" class="text">why</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _basis(results: dict[str, Any]) -> str:
    lines = []
    for reason, count in results["data"]["failed"].items():
        lines.append(f"<li>{count} × {escape(reason)}: not evaluated.</li>")
    for entry in results["explainers"]:
        name = escape(entry["explainer"])
        for reason, count in entry["missing_maps"].items():
            lines.append(f"<li>{name}: {count} × {escape(reason)}, excluded.</li>")
        if entry["constant_maps"]:
            lines.append(f"<li>{name}: {entry['constant_maps']} constant maps, scored in row-major order.</li>")
    excluded = f"<ul>{''.join(lines)}</ul>" if lines else "<p>No sample and no map was excluded.</p>"
    rest = {key: value for key, value in results.items() if key not in ("rows", "explainers")}
    text = escape(json.dumps(rest, indent=2, ensure_ascii=False))
    return (
        f"<section><h2>What the figures rest on</h2>{excluded}"
        f"<details><summary>Protocols, settings, versions</summary><pre>{text}</pre></details></section></main>"
    )


def _words(metric: str) -> str:
    return metric.replace("_minus_", " − ").replace("_", " ").replace("iou", "IoU")


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>").replace("(", "<wbr>(").replace("/", "/<wbr>")


def _bare(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
