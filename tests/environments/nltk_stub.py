"""Writes a word list and a table of parts of speech in NLTK's layout: `nltk_stub.py DIR`, then
NLTK_DATA=DIR. With it verifiers' textarena taskset runs without a download."""

import json
import pathlib
import sys

WORDS = """
apple bread chair dance eagle flame grape house image jelly knife lemon mouse night ocean plant
queen river stone table uncle voice water youth zebra bird boat cake desk garden planet silver
window bridge castle doctor flower island market number orange
""".split()  # noqa: SIM905
root = pathlib.Path(sys.argv[1])
words = root / "corpora" / "words"
tagger = root / "taggers" / "averaged_perceptron_tagger_eng"
for folder in (words, tagger):
    folder.mkdir(parents=True, exist_ok=True)
for name in ("en", "en-basic"):
    (words / name).write_text("\n".join(WORDS) + "\n")
for name, value in (("weights", {}), ("tagdict", dict.fromkeys(WORDS, "NN")), ("classes", ["NN"])):
    (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(value))
