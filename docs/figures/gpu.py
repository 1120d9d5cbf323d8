"""The scheme of the Triton backend: ``python docs/figures/gpu.py`` writes gpu-scheme.svg beside it."""

from pathlib import Path

STEPS = [
    ("GEMM", "Q Kᵀ", "scores of M rows, float32"),
    ("inner", "scores · left", "r sums a row; split over slots"),
    ("activate", "mix, relu, softplus", "weights; sums · right, ‖h‖²"),
    ("finish", "second mix, 1/rho", "weights in place; hidden keys 0"),
    ("GEMM", "weights · V", "output rows"),
]
WIDTH, HEIGHT, GAP = 150, 74, 28


def draw() -> str:
    """Return the SVG."""
    total = len(STEPS) * (WIDTH + GAP) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} 150" font-family="sans-serif" '
        'font-size="12" text-anchor="middle">',
        f'<rect width="{total}" height="150" fill="white"/>',
        f'<rect x="{WIDTH + GAP}" y="4" width="{3 * (WIDTH + GAP) - 4}" height="112" rx="6" fill="#f2f2f2"/>',
        f'<text x="{total / 2}" y="134" fill="#444">grey: row kernels in slot coordinates; the chunk stays '
        "in the level-2 cache. The next chunk of rows follows.</text>",
    ]
    for i, (name, formula, result) in enumerate(STEPS):
        x = 12 + i * (WIDTH + GAP)
        colour = "#cfe3f7" if name == "GEMM" else "#fde3c3"
        parts.append(
            f'<rect x="{x}" y="20" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}" stroke="#555"/>'
        )
        middle = x + WIDTH / 2
        parts.append(f'<text x="{middle}" y="40" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{middle}" y="60">{formula}</text>')
        parts.append(f'<text x="{middle}" y="80" font-size="9.5" fill="#444">{result}</text>')
        if i + 1 < len(STEPS):
            end = x + WIDTH + GAP
            parts.append(
                f'<path d="M{x + WIDTH + 3} 57 H{end - 4} m-7 -4 l7 4 l-7 4" fill="none" stroke="#333"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("gpu-scheme.svg").write_text(draw(), encoding="utf-8")
