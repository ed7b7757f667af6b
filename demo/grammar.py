"""English-German sentence pairs from a grammar of our own: the corpus of the demonstration.

A sentence is planned once (who does what to whom, where, when) and said twice. English needs do-support, particles, "a"
or "an". German needs gender, case, adjective endings, the finite verb second, first or last, and all that follows from
these. Some English nouns have several German ones (*bank*: Bank, Ufer). Such a noun is used only where the rest of the
sentence decides: an adjective, a verb, a place, or another clause altogether.

One English sentence has one German sentence. So *you* is always *du*; the past is always the perfect (but *war*); the
plain present is used only of habits, of states, and after *if* and *before*: *they read* alone is the past.

    python -m demo.grammar FOLDER [--count N] [--held-out N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hf_scratch_transformer.files import replacing

from .lexicon import (
    ADJECTIVES,
    CONTRACTIONS,
    DOUBLED,
    MODALS,
    NOUNS,
    RELATIONS,
    SENSES,
    THAT_VERBS,
    TIMES,
    TO_VERBS,
    TWO_WAY,
    VERBS,
)

MOST = 200_000  # pairs that one call may ask for; the grammar holds more
LENGTHS = range(3, 17)  # words of a sentence, in either language


@dataclass(frozen=True)
class Pair:
    """A sentence and its only translation, its `pattern`, and the English word in it that has several German ones."""

    english: str
    german: str
    pattern: str
    ambiguous: str | None


# Words and phrases ---------------------------------------------------------------------------------------------------

NOMINATIVE, ACCUSATIVE, DATIVE = range(3)
CASES = {"acc": ACCUSATIVE, "dat": DATIVE}
Classes = frozenset[str]


@dataclass(frozen=True)
class Noun:
    english: str
    english_plural: str
    gender: str  # der, die, das
    weak: bool
    mass: bool
    german: str
    plural: str  # "" for none
    classes: Classes
    where: tuple[str, ...]  # of a place: English, German for being there; English, German for going there

    def form(self, plural: bool, case: int) -> str:
        if not plural:
            return self.plural if self.weak and case != NOMINATIVE else self.german
        return self.plural + "n" if case == DATIVE and self.plural[-1] not in "ns" else self.plural


class Adjective(NamedTuple):
    english: str
    german: str
    classes: Classes
    general: bool


class Slot(NamedTuple):
    """A complement: an object (acc, dat), perhaps behind a preposition, a place (@) or a goal (>)."""

    kind: str
    english: str
    german: str
    classes: Classes
    required: bool


@dataclass(frozen=True)
class Verb:
    english: str
    particle: str
    past: str
    state: bool
    reflexive: bool
    prefix: str  # separable; the German forms are without it
    infinitive: str
    third: str
    auxiliary: str
    participle: str
    subjects: Classes
    slots: tuple[Slot, ...]

    @property
    def objects(self) -> Classes:
        return frozenset().union(*(slot.classes for slot in self.slots if slot.kind in CASES))

    def has(self, kind: str) -> bool:
        return any(slot.kind == kind for slot in self.slots)

    def present(self, person: int) -> str:
        """The finite verb for ich, du, er, wir, sie."""
        if self.infinitive in FORMS:
            return FORMS[self.infinitive].split()[person]
        root = self.third.removesuffix("t")
        du = root + ("t" if root[-1] in "sßz" else "st")
        return (self._stem + "e", du, self.third, self.infinitive, self.infinitive)[person]

    @property
    def imperative(self) -> str:
        """The command to a *du*: lies, fahr, öffne."""
        root = self.third.removesuffix("t")
        root = self._stem if "ä" in root and "ä" not in self.infinitive else root
        return root + ("e" if re.search("([dt]|er)$", root) else "")

    @property
    def _stem(self) -> str:
        return re.sub("e?n$", "", self.infinitive)


FORMS = {  # of I, you, he, we, they; ich, du, er, wir, sie
    "am": "am are is are are",
    "was": "was were was were were",
    "sein": "bin bist ist sind sind",
    "war": "war warst war waren waren",
    "haben": "habe hast hat haben haben",
    "wissen": "weiß weißt weiß wissen wissen",
}


def english_s(word: str) -> str:
    """The plural of a noun, the he-form of a verb: stories, watches, goes, keys."""
    if re.search("[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search("(s|x|ch|sh|[^aeiou]o)$", word) else "s")


def english_ending(word: str, ending: str) -> str:
    """A verb with -ed or -ing: robbed, sitting, arrived."""
    return (word + word[-1] if word in DOUBLED else word.removesuffix("e") if word != "see" else word) + ending


# Endings by gender and case; the plural is a fourth gender.
STRONG = {"der": ("er", "en", "em"), "die": ("e", "e", "er"), "das": ("es", "es", "em"), "plural": ("e", "e", "en")}
WEAK = {"der": ("e", "en", "en"), "die": ("e", "e", "en"), "das": ("e", "e", "en"), "plural": ("en", "en", "en")}
MIXED = {**STRONG, "der": ("", "en", "em"), "das": ("", "", "em")}
ARTICLE = {**STRONG, "die": ("ie", "ie", "er"), "das": ("as", "as", "em"), "plural": ("ie", "ie", "en")}
NONE = dict.fromkeys(STRONG, ("", "", ""))


class Determiner(NamedTuple):
    english: str
    english_plural: str  # and with mass nouns
    stem: str
    endings: dict[str, tuple[str, str, str]]


THE = Determiner("the", "the", "d", ARTICLE)
THIS = Determiner("this", "these", "dies", STRONG)
A = Determiner("a", "", "ein", MIXED)
NO = Determiner("a", "any", "kein", MIXED)  # English negates the verb, German the noun
BARE = Determiner("", "", "", NONE)
TWO = Determiner("", "two", "zwei", NONE)
THREE = Determiner("", "three", "drei", NONE)


@dataclass(frozen=True)
class Nominal:
    """A noun phrase or a pronoun, ready for any place in a sentence."""

    english: str
    english_object: str
    german: tuple[str, ...]  # by case
    person: int  # column of the verb tables
    reflexive: str = "sich"
    own: Determiner = THE  # my, your, ...
    pronoun: Nominal | None = None  # that refers to it; a pronoun has none
    relative: str = ""
    alive: bool = True
    negative: bool = False


def _pronoun(person: int, forms: str) -> Nominal:
    english, english_object, *german, reflexive, own, stem = forms.split()
    return Nominal(english, english_object, tuple(german), person, reflexive, Determiner(own, own, stem, MIXED))


PRONOUNS = {
    "I": _pronoun(0, "I me ich mich mir mich my mein"),
    "you": _pronoun(1, "you you du dich dir dich your dein"),
    "he": _pronoun(2, "he him er ihn ihm sich his sein"),
    "she": _pronoun(2, "she her sie sie ihr sich her ihr"),
    "we": _pronoun(3, "we us wir uns uns uns our unser"),
    "they": _pronoun(4, "they them sie sie ihnen sich their ihr"),
}
IT = {  # by the gender of what it stands for
    "der": _pronoun(2, "it it er ihn ihm sich its sein"),
    "die": _pronoun(2, "it it sie sie ihr sich its ihr"),
    "das": _pronoun(2, "it it es es ihm sich its sein"),
}
WHO = Nominal("who", "whom", ("wer", "wen", "wem"), 2)


def phrase(noun: Noun, determiner: Determiner, adjective: Adjective | None = None, plural: bool = False) -> Nominal:
    """A noun phrase in every case: *the old man* with *der alte Mann*, *den alten Mann*, *dem alten Mann*."""
    gender = "plural" if plural else noun.gender
    article = determiner.english_plural if plural or noun.mass else determiner.english
    described = _join(adjective.english if adjective else "", noun.english_plural if plural else noun.english)
    english = _join("an" if article == "a" and described[0] in "aeiou" else article, described)
    german = []
    for case in (NOMINATIVE, ACCUSATIVE, DATIVE):
        shown = determiner.endings[gender][case]
        ending = (WEAK if shown else STRONG)[gender][case]  # an adjective shows the case unless the determiner does
        quality = adjective.german.removesuffix("e") + ending if adjective else ""
        german.append(_join(determiner.stem + shown, quality, noun.form(plural, case)))
    if plural:
        pronoun = PRONOUNS["they"]
    elif "person" in noun.classes and noun.english != "child":  # das Mädchen, but sie
        pronoun = PRONOUNS["he" if gender == "der" else "she"]
    else:
        pronoun = IT[gender]
    return replace(
        pronoun,
        english=english,
        english_object=english,
        german=tuple(german),
        pronoun=pronoun,
        relative="d" + ARTICLE[gender][NOMINATIVE],
        alive=bool(noun.classes & {"person", "animal"}),
        negative=determiner is NO,
    )


def prepositional(preposition: str, german: str) -> str:
    """A preposition with its noun phrase, contracted where German does: *im Garten*, *zur Schule*."""
    article, _, rest = german.partition(" ")
    return _join(CONTRACTIONS.get(f"{preposition} {article}", f"{preposition} {article}"), rest)


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


# Clauses -------------------------------------------------------------------------------------------------------------


class Rank(IntEnum):
    """Where a piece stands between the two halves of the German verb."""

    PRONOUN, TIME, DATIVE, ACCUSATIVE, NOT, PLACE, CLOSE = range(7)


@dataclass(frozen=True)
class Piece:
    """A complement or adverbial in both languages; its kind is that of its slot, or "time"."""

    rank: Rank
    english: str
    german: str
    kind: str = ""
    negative: bool = False


@dataclass(frozen=True)
class Clause:
    """Subject, verb and pieces. The pieces are in English order; German orders them by rank."""

    subject: Nominal
    verb: Verb
    tense: str
    pieces: tuple[Piece, ...] = ()
    negated: bool = False

    def without(self, dropped: Piece) -> Clause:
        return replace(self, pieces=tuple(piece for piece in self.pieces if piece != dropped))

    def english(self, question: bool = False) -> str:
        """*he does not read the book*; as a question, *does he read the book*."""
        auxiliary, main = self._english_verb(support=question or self.negated)
        head = (auxiliary, self.subject.english) if question else (self.subject.english, auxiliary)
        return _join(*head, "not" * self.negated, main, self._english_rest).replace("can not", "cannot")

    @property
    def english_infinitive(self) -> str:
        return _join("to", self.verb.english, self._english_rest)

    @property
    def _english_rest(self) -> str:
        pronouns = [piece.english for piece in self.pieces if piece.rank == Rank.PRONOUN]
        others = [piece.english for piece in self.pieces if piece.rank != Rank.PRONOUN]
        return _join(*pronouns, self.verb.particle, *others)  # pick him up, pick up the guest

    def _english_verb(self, support: bool) -> tuple[str, str]:
        """The auxiliary, if there is one or must be (`support`), and the main verb."""
        verb, person, past = self.verb, self.subject.person, self.tense == "past"
        if verb is BE and self.tense not in MODALS:
            return FORMS["was" if past else "am"].split()[person], ""
        if self.tense == "present" and not verb.state:
            return FORMS["am"].split()[person], english_ending(verb.english, "ing")
        auxiliary, governing, _ = MODALS.get(self.tense, ("", "", ""))
        if support:
            auxiliary = auxiliary or ("did" if past else "does" if person == 2 else "do")
        first, _, rest = _join(governing, verb.english).partition(" ")
        if not auxiliary:
            first = verb.past if past else first if person != 2 else "has" if first == "have" else english_s(first)
        return auxiliary, _join(first, rest)

    @property
    def german_first(self) -> str:
        """The order of questions: the finite verb first."""
        finite, end = self._german_verb
        return _join(finite, self._german_middle(self._german_subject), end)

    def german_second(self, front: str = "") -> str:
        """The order of main clauses: the finite verb second, after the subject or what else comes first."""
        if front:
            return f"{front} {self.german_first}"
        finite, end = self._german_verb
        return _join(self._german_subject, finite, self._german_middle(), end)

    @property
    def german_last(self) -> str:
        """The order of subordinate clauses: the finite verb last, in one word with its prefix."""
        finite, end = self._german_verb
        verb = end + finite if end == self.verb.prefix else f"{end} {finite}"
        return _join(self._german_middle(self._german_subject), verb)

    @property
    def german_infinitive(self) -> str:
        """The order of infinitives: *das Radio auszumachen*."""
        verb = self.verb
        return _join(self._german_middle(), f"{verb.prefix}zu{'' if verb.prefix else ' '}{verb.infinitive}")

    @property
    def german_command(self) -> str:
        return _join(self.verb.imperative, self._german_middle(), self.verb.prefix)

    @property
    def _german_subject(self) -> str:
        return self.subject.german[NOMINATIVE]

    def _german_middle(self, subject: str = "") -> str:
        """What stands between the two halves of the verb, with the subject unless that comes first."""
        reflexive = self.subject.reflexive if self.verb.reflexive else ""
        head = (reflexive, subject) if self.subject.pronoun else (subject, reflexive)
        pieces = list(self.pieces)
        if self.negated and not any(piece.negative for piece in pieces):
            pieces.append(Piece(Rank.NOT, "", "nicht"))
        return _join(*head, *(piece.german for piece in sorted(pieces, key=lambda piece: piece.rank)))

    @property
    def _german_verb(self) -> tuple[str, str]:
        """The finite verb, and what stands at the end of a main clause: prefix, participle or infinitive."""
        verb, person = self.verb, self.subject.person
        if self.tense in MODALS:
            return MODALS[self.tense][2].split()[person], verb.prefix + verb.infinitive
        if self.tense != "past":
            return verb.present(person), verb.prefix
        if verb is BE:
            return FORMS["war"].split()[person], ""
        return FORMS[verb.auxiliary].split()[person], verb.prefix + verb.participle


# The lexicon, read ---------------------------------------------------------------------------------------------------


def _noun(entry: str, heading: Sequence[str] = (), where: Sequence[str] = ()) -> Noun:
    english, article, german, plural, *classes = entry.split()
    singular, _, irregular = english.partition("/")
    countable = plural != "-" and "season" not in classes and "season" not in heading
    return Noun(
        english=singular,
        english_plural=irregular or english_s(singular),
        gender=article.removesuffix("*"),
        weak=article.endswith("*"),
        mass=plural == "-",
        german=german,
        plural=plural.strip("-."),
        classes=frozenset([singular, *heading, *classes, *(["any"] * countable)]),
        where=tuple(word.replace("_", " ") for word in where),
    )


def _nouns() -> Iterator[Noun]:
    for heading, entries in NOUNS.items():
        classes = heading.split()
        where = [classes.pop() for _ in range(4)][::-1] if "{}" in heading else []
        for entry in entries.split(","):
            yield _noun(entry, classes, where)


def _slot(text: str) -> Slot:
    if text[0] in "@>":
        classes = text.strip("@>!") or "place"
        return Slot(text[0], "", "", frozenset(classes.split("/")), required=text[0] == ">" or "!" in text)
    head, classes = text.split(":")
    prepositions, _, case = head.rpartition("+")
    english, _, german = prepositions.partition("=")
    return Slot(case, english, german, frozenset(classes.split("/")), required=True)


def _verb(line: str) -> Verb:
    english, german, subjects, slots = (part.strip() for part in line.split("|"))
    name, *past = english.split()
    base, _, particle = name.removesuffix("*").partition("_")
    *reflexive, infinitive, third, auxiliary, participle = german.split()
    prefix, _, infinitive = infinitive.rpartition("-")
    return Verb(
        english=base,
        particle=particle,
        past=past[0] if past else english_ending(base, "ed"),
        state=name.endswith("*"),
        reflexive=bool(reflexive),
        prefix=prefix,
        infinitive=infinitive,
        third=third,
        auxiliary={"hat": "haben", "ist": "sein"}[auxiliary],
        participle=participle,
        subjects=frozenset(subjects.split("/")),
        slots=tuple(map(_slot, slots.split())),
    )


def _verbs(table: str) -> list[Verb]:
    return [_verb(line) for line in table.strip().splitlines()]


WORDS = list(_nouns())
ACTIONS, CLAIMS, INTENTIONS = _verbs(VERBS), _verbs(THAT_VERBS), _verbs(TO_VERBS)
BE = _verb("be* was | sein ist ist gewesen | person |")
QUALITIES = [
    Adjective(english.removesuffix("*"), german, frozenset(classes.split()), english.endswith("*"))
    for english, german, classes in (line.split(" | ") for line in ADJECTIVES.strip().splitlines())
]


@cache
def nouns(classes: Classes) -> list[Noun]:
    """The ordinary nouns of these classes."""
    return [noun for noun in WORDS if noun.classes & classes]


@cache
def qualities(noun: Noun) -> list[Adjective]:
    """What the noun may be."""
    return [quality for quality in QUALITIES if quality.classes & noun.classes]


@dataclass(frozen=True)
class Plan:
    """What a clause is to say; what is left open is chosen when it is said."""

    verb: Verb
    agent: Noun | None = None
    theme: Noun | None = None  # fills the slot that admits it
    quality: Adjective | None = None  # of the theme, or of the subject of *be*
    place: Noun | None = None


# What a pattern may need of a plan: a person as its subject, still open; a verb to command with; a described thing.
NEEDS: dict[str, Callable[[Plan], bool]] = {
    "anything": lambda plan: True,
    "person": lambda plan: plan.agent is None and "person" in plan.verb.subjects,
    "order": lambda plan: NEEDS["person"](plan) and not plan.verb.state,
    "description": lambda plan: plan.theme is not None and plan.quality is not None,
}


class Topic:
    """Plans by kind, all of which can be understood by themselves."""

    def __init__(self, *kinds: list[Plan]):
        self.plans = {
            need: [found for kind in kinds if (found := list(filter(test, kind)))] for need, test in NEEDS.items()
        }


class Sense(Topic):
    """One meaning of an ambiguous word: plans that tell it, hints at it, and `neutral` plans that need a hint."""

    def __init__(self, noun: Noun, rivals: Sequence[Noun], homes: Sequence[Noun], hints: Sequence[Plan]):
        def tells(classes: Classes) -> bool:
            return bool(classes & noun.classes) and not any(classes & rival.classes for rival in rivals)

        self.noun, self.hints, self.neutral = noun, hints, [Plan(verb, theme=noun) for verb in NEUTRAL]
        telling = [quality for quality in QUALITIES if not quality.general and tells(quality.classes)]
        super().__init__(
            [replace(plan, quality=quality) for plan in self.neutral for quality in telling],
            [Plan(BE, agent=noun, quality=quality) for quality in telling],
            [Plan(verb, theme=noun) for verb in ACTIONS if tells(verb.objects)],
            [Plan(verb, agent=noun) for verb in COMPLETE if tells(verb.subjects)],
            [replace(plan, place=home) for plan in self.neutral if plan.verb.has("@") for home in homes],
        )


NEUTRAL = [verb for verb in ACTIONS if "any" in verb.objects]
COMPLETE = [verb for verb in ACTIONS if all(nouns(slot.classes) for slot in verb.slots)]  # without ambiguous words
GOINGS = [verb for verb in ACTIONS if verb.english in ("go", "run", "drive")]
ORDINARY = Topic(
    *[[Plan(verb) for verb in COMPLETE if nouns(verb.subjects)]] * 8,
    [Plan(BE, agent=noun, quality=quality) for quality in QUALITIES for noun in nouns(quality.classes)],
    [Plan(BE, quality=quality) for quality in QUALITIES if "person" in quality.classes],
    [Plan(verb, None, n, q) for verb in NEUTRAL for q in QUALITIES for n in nouns(q.classes) if "any" in n.classes],
)


def _hint(text: str) -> Plan:
    """*pay bill*, *go beach*: the first verb of that name that has a slot for the noun."""
    name, english = text.split()
    [noun] = [noun for noun in WORDS if noun.english == english]
    verbs = [verb for verb in ACTIONS if f"{verb.english}_{verb.particle}".strip("_") == name]
    verb, slot = next((verb, slot) for verb in verbs for slot in verb.slots if slot.classes & noun.classes)
    return Plan(verb, theme=noun) if slot.kind in CASES else Plan(verb, place=noun)


def _senses(word: str, table: str) -> list[Sense]:
    rows = [[part.strip() for part in row.split("|")] for row in table.strip().splitlines()]
    meant = [_noun(f"{word} {entry} any") for entry, _, _ in rows]
    return [
        Sense(
            noun,
            rivals=[rival for rival in meant if rival is not noun],
            homes=[place for place in WORDS if place.english in homes.split()],
            hints=[_hint(hint) for hint in hints.split(",")],
        )
        for noun, (_, homes, hints) in zip(meant, rows, strict=True)
    ]


AMBIGUOUS = {word: _senses(word, table) for word, table in SENSES.items()}


# Saying a plan -------------------------------------------------------------------------------------------------------


class Speaker(random.Random):
    """Chooses what a plan leaves open and puts it into words."""

    def perhaps(self, probability: float) -> bool:
        return self.random() < probability

    def plan(self, topic: Topic, need: str) -> Plan:
        return self.choice(self.choice(topic.plans[need]))

    def noun(self, classes: Classes, said: Nominal | None = None) -> Noun:
        """An ordinary noun; if there is a choice, not one of what is `said`."""
        found = nouns(classes)
        return self.choice([noun for noun in found if not said or noun.english not in said.english.split()] or found)

    def noun_phrase(self, noun: Noun, own: Determiner, quality: Adjective | None = None, negated: str = "") -> Nominal:
        """The noun with what may go before it; `negated`: in a negated clause, the case or preposition it stands in."""
        plural = bool(noun.plural) and self.perhaps(0.3)
        if "season" in noun.classes or "sport" in noun.classes:
            determiners = [THE if "season" in noun.classes else BARE]
        elif negated:  # "not a" is always kein, so no A
            determiners = [THE, THIS, own] + [NO] * (3 if negated == "acc" else 0)
        elif noun.mass:
            determiners = [BARE, BARE, THE]
        elif plural:
            determiners = [THE, THE, THIS, own, BARE, TWO, THREE]
        else:
            determiners = [THE, THE, THE, A, A, THIS, own]
        if quality is None and noun.english not in AMBIGUOUS and self.perhaps(0.2):
            quality = self.choice(qualities(noun) or [None])
        return phrase(noun, self.choice(determiners), quality, plural)

    def subject(self, classes: Classes, named: bool = False) -> Nominal:
        """Who does it: a pronoun, unless it must be `named` by a noun, or a noun phrase."""
        if "person" in classes and not named and self.perhaps(0.4):
            return PRONOUNS[self.choice(("I", "I", "you", "you", "he", "she", "we", "they"))]
        return self.noun_phrase(self.noun(classes), self.choice(list(PRONOUNS.values())).own)

    def object(self, slot: Slot, plan: Plan, subject: Nominal, negated: bool) -> Nominal:
        """What fills a slot: the theme of the plan, a pronoun, or any noun that the verb takes."""
        case = slot.german or slot.kind if negated else ""
        if plan.theme and slot.classes & plan.theme.classes:
            return self.noun_phrase(plan.theme, subject.own, plan.quality, case)
        if "person" in slot.classes and self.perhaps(0.3):
            mine = (0, 3) if subject.person in (0, 3) else (subject.person,)  # neither "I see me" nor "we see me"
            return self.choice([pronoun for pronoun in PRONOUNS.values() if pronoun.person not in mine])
        return self.noun_phrase(self.noun(slot.classes, subject), subject.own, None, case)

    def place(self, slot: Slot, plan: Plan, subject: Nominal) -> Piece:
        """Where it happens, or where it leads."""
        goal = slot.kind == ">"
        noun = plan.place or self.noun(slot.classes, subject)
        english, german = noun.where[2:] if goal else noun.where[:2]
        if "landmark" in noun.classes and self.perhaps(0.3):
            english, german = self.both(RELATIONS)
        personal = "person" in noun.classes
        plural = not personal and self.perhaps(0.15)
        determiners = [THE, THE, THE, THIS, *([subject.own] * personal), *([A] * (not plural))]
        nominal = phrase(noun, self.choice(determiners), None, plural)
        english = english.format(nominal.english) if "{}" in english else _join(english, nominal.english)
        case = ACCUSATIVE if goal and german in TWO_WAY else DATIVE
        return Piece(
            Rank.CLOSE if goal else Rank.PLACE, english, prepositional(german, nominal.german[case]), slot.kind
        )

    def both(self, table: Sequence[str]) -> tuple[str, str]:
        """A row of a table of phrases in both languages."""
        english, german = self.choice(table).split("|")
        return english, german

    def clause(
        self,
        plan: Plan,
        tense: str,
        subject: Nominal | None = None,
        theme: Nominal | None = None,
        negated: bool = False,
        time: float = 0.0,
    ) -> Clause:
        """The plan in words, with an object to use as it is (`theme`) and the probability that a `time` is named."""
        verb = plan.verb
        if subject is None:
            own = self.choice(list(PRONOUNS.values())).own
            subject = self.noun_phrase(plan.agent, own) if plan.agent else self.subject(verb.subjects)
        if tense in MODALS and (verb.state or tense in ("want", "like") and not subject.alive):
            tense = "will"
        pieces = []
        if verb is BE and plan.quality:
            pieces.append(Piece(Rank.CLOSE, plan.quality.english, plan.quality.german))
        for slot in verb.slots:
            if slot.kind in CASES:
                pieces.append(object_piece(slot, theme or self.object(slot, plan, subject, negated)))
            elif slot.required or plan.place or not (negated or plan.theme) and self.perhaps(0.35):  # no false hint
                pieces.append(self.place(slot, plan, subject))
        if self.perhaps(time):
            pieces.append(Piece(Rank.TIME, *self.both(TIMES.get(tense, TIMES["modal"])), "time"))
        return Clause(subject, verb, tense, tuple(pieces), negated)


def object_piece(slot: Slot, nominal: Nominal) -> Piece:
    """An object in its slot, in the case and behind the prepositions that the slot asks for."""
    german = nominal.german[CASES[slot.kind]]
    rank = Rank.DATIVE if slot.kind == "dat" else Rank.ACCUSATIVE
    if slot.german:
        rank, german = Rank.CLOSE, prepositional(slot.german, german)
    elif nominal.pronoun is None:
        rank = Rank.PRONOUN
    return Piece(rank, _join(slot.english, nominal.english_object), german, slot.kind, nominal.negative)


# Sentence patterns: a pattern says one plan, or a main and a side plan, in both languages -----------------------------

Sentence = tuple[str, str]
Simple = Callable[[Speaker, Plan], Sentence]
Complex = Callable[[Speaker, Plan, Plan], Sentence]
BOTH = ("present", "past")
ANY_TENSE = (*BOTH, *MODALS)
LINKS = (", but|, aber", " and| und")


def statement(*tenses: str, time: float = 0.0, negated: bool = False) -> Simple:
    """A main clause in one of the tenses, with the probability that it names a time."""

    def say(speaker: Speaker, plan: Plan) -> Sentence:
        clause = speaker.clause(plan, speaker.choice(tenses), time=time, negated=negated)
        return clause.english() + ".", clause.german_second() + "."

    return say


def fronted(speaker: Speaker, plan: Plan) -> Sentence:
    """A time or a place comes first, so the German verb comes before its subject."""
    clause = speaker.clause(plan, speaker.choice(("plain", *ANY_TENSE)), time=1)
    front = speaker.choice([piece for piece in clause.pieces if piece.kind in ("time", "@")])
    rest = clause.without(front)
    return f"{front.english} {rest.english()}.", rest.german_second(front.german) + "."


def question(speaker: Speaker, plan: Plan) -> Sentence:
    clause = speaker.clause(plan, speaker.choice(ANY_TENSE), time=0.3)
    return clause.english(question=True) + "?", clause.german_first + "?"


def wh_question(speaker: Speaker, plan: Plan) -> Sentence:
    tense = speaker.choice(BOTH)
    if plan.agent is None and "person" in plan.verb.subjects and speaker.perhaps(0.3):
        clause = speaker.clause(plan, tense, WHO)
        return clause.english() + "?", clause.german_second() + "?"
    clause = speaker.clause(plan, tense)
    asked, wann = speaker.both(("why|warum", "when|wann"))
    places = [piece for piece in clause.pieces if piece.kind in ("@", ">")]
    if places and plan.place is None and speaker.perhaps(0.7):  # a planned place may be what tells a sense
        clause, asked, wann = clause.without(places[0]), "where", "wo" if places[0].kind == "@" else "wohin"
    return f"{asked} {clause.english(question=True)}?", f"{wann} {clause.german_first}?"


def command(speaker: Speaker, plan: Plan) -> Sentence:
    english, german = speaker.choice((("", ""), ("please", "bitte"), ("do not", "")))
    clause = speaker.clause(plan, "plain", PRONOUNS["you"], negated=english == "do not")
    return _join(english, clause.english_infinitive[3:]) + "!", _join(german, clause.german_command) + "!"


def that(speaker: Speaker, plan: Plan) -> Sentence:
    claim = speaker.clause(Plan(speaker.choice(CLAIMS)), speaker.choice(BOTH))
    clause = speaker.clause(plan, "past" if claim.tense == "past" else speaker.choice(ANY_TENSE))
    return f"{claim.english()} that {clause.english()}.", f"{claim.german_second()}, dass {clause.german_last}."


def infinitive(speaker: Speaker, plan: Plan) -> Sentence:
    main = speaker.clause(Plan(speaker.choice(INTENTIONS)), speaker.choice(BOTH))
    clause = speaker.clause(plan, "plain", main.subject)
    return (
        f"{main.english()} {clause.english_infinitive}.",
        f"{main.german_second()}, {clause.german_infinitive}.",
    )


def purpose(speaker: Speaker, plan: Plan) -> Sentence:
    subject = speaker.subject(BE.subjects)
    main = speaker.clause(Plan(speaker.choice(GOINGS)), speaker.choice(ANY_TENSE), subject)
    clause = speaker.clause(plan, "plain", subject)
    return (
        f"{main.english()} in order {clause.english_infinitive}.",
        f"{main.german_second()}, um {clause.german_infinitive}.",
    )


def reference(speaker: Speaker, plan: Plan) -> Sentence:
    """What is described is then a pronoun, and a German *it* has the gender of what it stands for."""
    assert plan.theme
    plural = bool(plan.theme.plural) and speaker.perhaps(0.3)
    thing = phrase(plan.theme, speaker.choice((THE, THE if "season" in plan.theme.classes else THIS)), None, plural)
    verbs = [verb for verb in NEUTRAL if not verb.slots[0].german]  # others would need "davon", "daran"
    first = speaker.clause(Plan(BE, quality=plan.quality), speaker.choice(BOTH), thing)
    return linked(speaker, first, speaker.clause(Plan(speaker.choice(verbs)), first.tense, theme=thing.pronoun))


def linked(speaker: Speaker, first: Clause, second: Clause) -> Sentence:
    and_, und = speaker.both(LINKS)
    return (
        f"{first.english()}{and_} {second.english()}.",
        f"{first.german_second()}{und} {second.german_second()}.",
    )


def subjects(speaker: Speaker, named: bool = False) -> tuple[Nominal, Nominal]:
    """The subjects of two clauses: mostly one person, by a pronoun the second time."""
    first, other = speaker.subject(BE.subjects, named), speaker.subject(BE.subjects)
    return first, (first.pronoun or first) if speaker.perhaps(0.7) else other


def coordination(speaker: Speaker, main_plan: Plan, side_plan: Plan) -> Sentence:
    tense, (first, second) = speaker.choice(BOTH), subjects(speaker)
    return linked(speaker, speaker.clause(main_plan, tense, first), speaker.clause(side_plan, tense, second))


def subordinate(english: str, german: str, tenses: Sequence[tuple[str, str]]) -> Complex:
    """A clause with a conjunction, after or before the main clause; `tenses`: of both, those that go together."""

    def say(speaker: Speaker, main_plan: Plan, side_plan: Plan) -> Sentence:
        main_tense, side_tense = speaker.choice(tenses)
        first, second = subjects(speaker)
        main_first = speaker.perhaps(0.5)
        main = speaker.clause(main_plan, main_tense, first if main_first else second)
        side = speaker.clause(side_plan, side_tense, second if main_first else first)
        side_english, side_german = f"{english} {side.english()}", f"{german} {side.german_last}"
        if main_first:
            return f"{main.english()} {side_english}.", f"{main.german_second()}, {side_german}."
        return f"{side_english}, {main.english()}.", main.german_second(f"{side_german},") + "."

    return say


def relative(speaker: Speaker, main_plan: Plan, side_plan: Plan) -> Sentence:
    person, _ = subjects(speaker, named=True)
    who = replace(person, english="who", german=(person.relative,), pronoun=None)
    side = speaker.clause(side_plan, speaker.choice(BOTH), who)
    english = f"{person.english} {side.english()}"
    person = replace(person, english=english, german=(f"{person.german[NOMINATIVE]}, {side.german_last},",))
    main = speaker.clause(main_plan, side.tense, person)
    return main.english() + ".", main.german_second() + "."


SIMPLE: dict[str, tuple[Simple, str]] = {  # with what they need of their plan
    "present": (statement("present", time=0.4), "anything"),
    "habit": (statement("plain", time=1), "anything"),
    "past": (statement("past", time=0.4), "anything"),
    "modal": (statement(*MODALS, time=0.4), "anything"),
    "negation": (statement(*ANY_TENSE, negated=True), "anything"),
    "fronted": (fronted, "anything"),
    "question": (question, "anything"),
    "wh_question": (wh_question, "anything"),
    "command": (command, "order"),
    "that": (that, "anything"),
    "infinitive": (infinitive, "order"),
    "purpose": (purpose, "order"),
    "reference": (reference, "description"),
}
COMPLEX: dict[str, Complex] = {
    "because": subordinate("because", "weil", [("present", "present"), ("past", "past"), ("will", "present")]),
    "although": subordinate("although", "obwohl", [("present", "present"), ("past", "past"), ("will", "present")]),
    "if": subordinate("if", "wenn", [(tense, "plain") for tense in MODALS]),
    "before": subordinate("before", "bevor", [("past", "past")] * 3 + [(tense, "plain") for tense in MODALS]),
    "coordination": coordination,
    "relative": relative,
}
PATTERNS = (*SIMPLE, *COMPLEX)


# The corpus ----------------------------------------------------------------------------------------------------------


def _draw(speaker: Speaker) -> Pair:
    pattern = speaker.choice(PATTERNS)
    word = speaker.choice(list(AMBIGUOUS)) if speaker.perhaps(0.4) else None
    sense = speaker.choice(AMBIGUOUS[word]) if word else None
    if pattern in SIMPLE:
        say, need = SIMPLE[pattern]
        english, german = say(speaker, speaker.plan(sense or ORDINARY, need))
    else:
        if sense:
            plans = [speaker.choice(sense.hints), speaker.choice(sense.neutral)]
        else:
            plans = [speaker.plan(ORDINARY, "person"), speaker.plan(ORDINARY, "person")]
        speaker.shuffle(plans)
        english, german = COMPLEX[pattern](speaker, *plans)
    return Pair(english[0].upper() + english[1:], german[0].upper() + german[1:], pattern, word)


def generate(count: int, seed: int = 0) -> list[Pair]:
    """`count` pairs with distinct English sentences, the same for the same seed.

    Raises ValueError if `count` is not from 1 to MOST.
    """
    if not 1 <= count <= MOST:
        raise ValueError(f"count={count} must be from 1 to {MOST}, the most pairs that are drawn from the grammar")
    speaker = Speaker(seed)
    pairs: dict[str, Pair] = {}
    while len(pairs) < count:
        pair = _draw(speaker)
        if len(pair.english.split()) in LENGTHS and len(pair.german.split()) in LENGTHS:
            known = pairs.setdefault(pair.english, pair)
            assert known.german == pair.german, f"two translations: {known} and {pair}"
    return list(pairs.values())


class Split(NamedTuple):
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def words(sentence: str) -> list[str]:
    """The lower-cased words of a sentence, without punctuation."""
    return re.findall(r"[\w']+", sentence.lower())


def split(pairs: Sequence[Pair], held_out: int, seed: int = 0) -> Split:
    """Holds out `held_out` pairs for validation and as many for the test, the same for the same seed.

    A pair is held out only if its pattern and all its words in both languages, the sense of an ambiguous one with them,
    are still found in training. Raises ValueError if so many pairs cannot be held out.
    """
    if held_out < 1:
        raise ValueError(f"held_out={held_out} must be at least 1")
    left: Counter[tuple[str, str]] = Counter()
    marked = [(pair, _marks(pair)) for pair in pairs]
    for _, marks in marked:
        left.update(marks)
    random.Random(seed).shuffle(marked)
    train: list[Pair] = []
    held: list[Pair] = []
    for pair, marks in marked:
        if len(held) < 2 * held_out and all(left[mark] > 1 for mark in marks):
            left.subtract(marks)
            held.append(pair)
        else:
            train.append(pair)
    if len(held) < 2 * held_out:
        raise ValueError(
            f"held_out={held_out} for validation and for the test is too much: of {len(pairs)} pairs, only {len(held)} "
            "can be held out with all their words still found in the rest"
        )
    return Split(train, held[:held_out], held[held_out:])


def _marks(pair: Pair) -> set[tuple[str, str]]:
    """What must be known to translate the pair."""
    languages = {"en": words(pair.english), "de": words(pair.german), "pattern": [pair.pattern]}
    return {(language, word) for language, found in languages.items() for word in found}


FILES = ("train.en", "train.de", "valid.en", "valid.de", "test.en", "test.de", "test.jsonl")


def write(folder: str | os.PathLike[str], count: int = 40_000, held_out: int = 1_000, seed: int = 0) -> Split:
    """Writes a corpus of `count` pairs as parallel text files, a sentence a line, and the test also as JSON lines.

    The folder appears complete or not at all, in the place of an earlier corpus. Raises ValueError as `generate` and
    `split` do, and if there is something else in the folder.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= set(FILES)):
        raise ValueError(f"folder={str(folder)!r} holds something other than a corpus; name a new folder")
    parts = split(generate(count, seed), held_out, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as fresh:
        fresh.mkdir()
        for part, pairs in parts._asdict().items():
            _write_lines(fresh / f"{part}.en", (pair.english for pair in pairs))
            _write_lines(fresh / f"{part}.de", (pair.german for pair in pairs))
        _write_lines(fresh / "test.jsonl", (json.dumps(asdict(pair), ensure_ascii=False) for pair in parts.test))
    return parts


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.grammar", description="Write the demonstration corpus.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40_000, help="sentence pairs (%(default)s)")
    parser.add_argument(
        "--held-out", type=int, default=1_000, help="of them for validation, and for the test (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        parts = write(options.folder, options.count, options.held_out, options.seed)
    except (ValueError, OSError) as error:
        print(f"demo.grammar: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}:", ", ".join(f"{len(pairs)} {part}" for part, pairs in parts._asdict().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
