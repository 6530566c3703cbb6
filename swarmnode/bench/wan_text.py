"""Three kinds of text to generate from, for what speculation is worth: prose, code, edit. Deterministic.

    prose   English sentences that do not repeat themselves
    code    the middle of library sources that the demo model was not trained on
    edit    a piece of code and the beginning of the same piece with a name changed: what follows stands, nearly word
            for word, in the prompt

Prompts are short (70 to 180 tokens of the demo model), so that its context of 512 leaves room for an answer. Called by
`wan.py`, and for whatever else compares kinds of text.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Literal, get_args

from swarmnode.errors import UsageError

TextClass = Literal["prose", "code", "edit"]
CLASSES: tuple[TextClass, ...] = get_args(TextClass)

_CODE_CHARACTERS = 480
# In the part of the standard library that the demo model's recipe holds out, and in every Python from 3.11 on.
CODE_FILES = ("getopt.py", "http/client.py", "logging/handlers.py", "unittest/result.py")
_DEFINITION = re.compile(r"^ *(?:def|class) ", re.MULTILINE)

_PROSE = (
    """The harbour was quiet when the last ferry came in. A few people stood under the lamps and waited for those who
had gone over to the island that morning. Nobody spoke much. The rain of the afternoon had left the stones dark, and
the water between the boats moved as slowly as oil. Old Marten counted the passengers as he always did, one hand on the
rail, and found that there was one too many. He counted again. Then he""",
    """Anyone who has kept bees for some years knows that a hive has moods. On warm days in May the air before the
entrance is full of traffic, and you can sit beside it with a book. In August, before a storm, the same colony will
follow you to the garden gate. What changes is not the weather alone. The nectar has ended, the young queens are gone,
and there are stores to be defended. My neighbour, who""",
    """In the first winter of the railway the company lost more money on snow than on wages. Three engines stood for a
week in the cutting above the mill, and the men who dug them out were paid in coal. The directors wrote to each other
about tunnels. An engineer from the north, asked for his opinion, replied on a postcard that the line had been laid on
the wrong side of the hill. It took""",
    """My grandmother baked on Thursdays because the oven of the village was free on Thursdays, and long after she had
an oven of her own she went on doing so. She measured nothing. A cup was whatever cup stood nearest, and the dough was
ready when it sounded right under her knuckles. Of the many things that she tried to teach me I have kept two: how to
wait, and why the crust""",
)

# Each restates its first part with another name; the copy has begun. (The demo model is too small to repeat a page
# because it was asked to; what such a page looks like to it, it goes on with.)
_EDIT = (
    """    def test_types(self):
        self.assertEqual(self.reader.read("int"), 1)
        self.assertEqual(self.reader.read("str"), "a")
        self.assertEqual(self.reader.read("list"), [])
        self.assertEqual(self.reader.read("dict"), {})

    def test_names(self):
        self.assertEqual(self.writer.write("int"), 1)
        self.assertEqual(self.writer.write("str"), "a")
        self.assertEqual(self.writer.""",
    """    def test_errors(self):
        self.assertRaises(TypeError, self.parser.read, None)
        self.assertRaises(TypeError, self.parser.read, 1)
        self.assertRaises(ValueError, self.parser.read, "")
        self.assertRaises(ValueError, self.parser.read, "a")

    def test_errors_of_writer(self):
        self.assertRaises(TypeError, self.writer.write, None)
        self.assertRaises(TypeError, self.""",
    """    def copy(self):
        other = Options()
        other.name = self.name
        other.path = self.path
        other.mode = self.mode
        other.size = self.size
        return other

    def update(self, other):
        self.name = other.name
        self.path = other.""",
    """        self.check('border', 0, 1.3, 2.9, 6, -2, '10p')
        self.check('height', 100, 101.2, 102.6, -100, 0, '3c')
        self.check('width', 402, 403.4, 404.6, -402, 0, '5i')

    def test_configure(self):
        widget = self.create()
        self.checkIntegerParam(widget, 'height', 1, 2, 3)
        self.checkIntegerParam(widget, 'width', 1, 2, 3)
        self.checkIntegerParam(widget, '""",
)


def prompts(kind: TextClass) -> tuple[str, ...]:
    """The prompts of one class, always the same ones. UsageError where this Python came without its sources."""
    if kind == "prose":
        return tuple(text.replace("\n", " ") for text in _PROSE)
    if kind == "code":
        return tuple(_code(name) for name in CODE_FILES)
    return _EDIT


def _code(name: str) -> str:
    """What follows the first definition after the middle of a library file; it ends within a line."""
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the code prompts are Python's own sources: {error.strerror}") from None
    begin = _DEFINITION.search(text, len(text) // 2)
    at = begin.start() if begin is not None else 0
    return text[at : at + _CODE_CHARACTERS].rpartition(" ")[0].rstrip()
