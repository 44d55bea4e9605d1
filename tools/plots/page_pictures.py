"""Take pictures of a page of runs in a headless Chromium, for docs/report.md.

    python tools/plots/page_pictures.py report.html --out docs/pictures/report_run.png
    python tools/plots/page_pictures.py report.html --out a.png --section load --dark
    python tools/plots/page_pictures.py http://127.0.0.1:8421/ --out live.png

The page is drawn as a person sees it who opens it: the first window, or the section
that is named. Needs playwright (extra `dev`) and Debian's package `chromium`. Exit
codes: 0 done, 2 bad input.
"""

import argparse
import io
import pathlib
import shutil
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import BAD_INPUT, refuse  # noqa: E402

NUM_COLORS = 256
"""Colors of a picture's palette: it makes the files small."""
SCROLL = "(e) => e.scrollIntoView({behavior: 'instant'})"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        image = take(args)
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)
    args.out.write_bytes(image)
    print(f"{args.out}  {len(image) / 1e3:.0f} kB")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("page", help="page of tools/report.py, or its address")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="PNG to write")
    parser.add_argument("--section", help="id of the section to show, such as load")
    parser.add_argument("--width", type=int, default=1280, help="pixels (1280)")
    parser.add_argument("--height", type=int, default=900, help="pixels (900)")
    parser.add_argument("--dark", action="store_true", help="the dark colors")
    return parser.parse_args(argv)


def take(args: argparse.Namespace) -> bytes:
    """Return the picture as PNG. Raises ValueError where there is no browser, or no
    such section."""
    from playwright.sync_api import sync_playwright

    if (chromium := shutil.which("chromium")) is None:
        raise ValueError("no chromium on the PATH: apt-get install chromium")
    address = args.page
    if not address.startswith("http://127.0.0.1:"):
        if not (path := pathlib.Path(args.page)).is_file():
            raise ValueError(f"{path} is no file: make a page with tools/report.py")
        address = path.resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(
            viewport={"width": args.width, "height": args.height},
            color_scheme="dark" if args.dark else "light",
        )
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        if args.section:
            place = page.locator(f"section[id='{args.section}']")
            if not place.count():
                raise ValueError(f"the page has no section {args.section!r}")
            place.evaluate(SCROLL)
        page.wait_for_timeout(1000)  # figures near the window are drawn
        return small(page.screenshot())


def small(png: bytes) -> bytes:
    """Return a picture with a palette of NUM_COLORS."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(NUM_COLORS, dither=0)
    image.save(out := io.BytesIO(), "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
