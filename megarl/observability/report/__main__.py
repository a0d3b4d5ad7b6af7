"""megarl report RUN_DIR... --out report.html"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megarl.observability.report import write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report that the command line asks for and prints its path."""
    parser = argparse.ArgumentParser(
        prog="megarl report",
        description="Write one self-contained HTML report about one or several runs.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[LABEL=]RUN_DIR",
        help="directories with a stats.jsonl; the first is the report's subject",
    )
    parser.add_argument("--out", default="report.html", help="the file to write (report.html)")
    parser.add_argument("--title", help="headline; the first run's label by default")
    parser.add_argument("--subtitle", default="", help="one line below the headline")
    parser.add_argument("--max-samples", type=int, default=12, help="rows of samples shown (12)")
    args = parser.parse_args(argv)
    try:
        path = write_report(
            args.out,
            args.runs,
            title=args.title,
            subtitle=args.subtitle,
            max_samples=args.max_samples,
        )
    except (ValueError, FileNotFoundError) as e:
        parser.error(str(e))
    print(path)


if __name__ == "__main__":
    main()
