"""Draws docs/forebay.svg, the picture of the README: `python docs/picture.py > docs/forebay.svg`."""

BOX = '<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" class="{kind}"/>'
TOP = 304
"""Where the row of workers begins."""
TEXT = '<text x="{x}" y="{y}" class="{kind}">{text}</text>'


def box(x: int, y: int, w: int, h: int, title: str, lines: list[str], kind: str = "process") -> str:
    parts = [BOX.format(x=x, y=y, w=w, h=h, kind=kind), TEXT.format(x=x + 14, y=y + 24, kind="title", text=title)]
    parts += [TEXT.format(x=x + 14, y=y + 44 + 17 * i, kind="line", text=line) for i, line in enumerate(lines)]
    return "\n".join(parts)


def arrow(points: str, kind: str) -> str:
    return f'<path d="{points}" class="{kind}" marker-end="url(#{kind})"/>'


def label(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="label {kind}">{text}</text>'


def worker(x: int, gpu: str, models: list[str]) -> str:
    parts = [box(x, TOP, 300, 176, f"worker · {gpu}", ["lane core: batches, chunks, one step ahead"])]
    for index, model in enumerate(models):
        parts.append(BOX.format(x=x + 14 + 92 * index, y=TOP + 60, w=84, h=30, kind="model"))
        parts.append(TEXT.format(x=x + 30 + 92 * index, y=TOP + 80, kind="line", text=model))
    parts.append(BOX.format(x=x + 14, y=TOP + 104, w=272, h=56, kind="pool"))
    parts.append(TEXT.format(x=x + 26, y=TOP + 124, kind="line", text="one pool of slabs, cut into all-layer KV"))
    parts.append(TEXT.format(x=x + 26, y=TOP + 142, kind="line", text="blocks; models of any shape share it"))
    return "\n".join(parts)


def picture() -> str:
    body = [
        box(20, 96, 170, 76, "clients", ["OpenAI's API,", "streaming and not"], "outside"),
        box(246, 60, 250, 148, "front door", ["HTTP, tokenizers, stop strings;", "keeps each prompt and what was", "delivered: resumes a request", "when its worker is lost"]),
        box(606, 60, 250, 148, "scheduler", ["central core: admission, routing,", "one ending for every request;", "starts and supervises the rest;", "events only, no token passes"]),
        worker(260, "cpu:0", ["llm-0", "llm-1"]),
        worker(610, "cpu:1", ["llm-0", "llm-2"]),
        arrow("M190 122 H242", "control"), arrow("M246 148 H194", "tokens"),
        arrow("M496 112 H602", "control"), label(512, 102, "submit, abort", "control"),
        arrow("M606 148 H500", "control"), label(520, 166, "interrupted", "control"),
        arrow("M622 208 C614 262 486 236 478 300", "control"), arrow("M548 304 C556 262 654 278 660 212", "control"),
        arrow("M694 208 V300", "control"), label(703, 258, "load, start, cancel", "control"),
        arrow("M828 304 V212", "control"), label(837, 258, "started, ended", "control"),
        arrow("M330 304 V212", "tokens"), label(182, 262, "tokens, a frame a step", "tokens"),
        arrow("M640 304 C620 262 440 272 420 212", "tokens"),
    ]  # fmt: skip
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 950 500" font-family="system-ui, sans-serif" role="img"
 aria-label="Clients talk to the front door, the front door and the workers to the scheduler; tokens go straight from the workers to the front door">
<style>
.process {{ fill: #f4f7fb; stroke: #41618c; stroke-width: 1.5 }}
.outside {{ fill: #ffffff; stroke: #8a8f98; stroke-width: 1.5; stroke-dasharray: 5 4 }}
.model {{ fill: #dbe7f6; stroke: #41618c }} .pool {{ fill: #d9f0ea; stroke: #2b8a72 }}
.title {{ font-size: 15px; font-weight: 600; fill: #1d2733 }} .line {{ font-size: 12.5px; fill: #36414f }}
.label {{ font-size: 12px }} path {{ fill: none; stroke-width: 1.8 }}
path.control {{ stroke: #41618c }} path.tokens {{ stroke: #2b8a72; stroke-width: 2.6 }}
text.control {{ fill: #41618c }} text.tokens {{ fill: #22705c }}
</style>
<defs>
<marker id="control" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" style="fill:#41618c"/></marker>
<marker id="tokens" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0 L8 4 L0 8 z" style="fill:#2b8a72"/></marker>
</defs>
<rect width="950" height="500" fill="#ffffff"/>
<text x="20" y="34" style="font-size:18px;font-weight:600;fill:#1d2733">Forebay: several models, a few devices, real processes</text>
{chr(10).join(body)}
</svg>"""


if __name__ == "__main__":
    print(picture())
