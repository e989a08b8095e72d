"""Chat templates: ordinary ones render as Jinja renders them, hostile ones end in an error, soon and small.

Soon is counted in looks at the clock, which a template takes at each of its steps: no test here measures time.
"""

from __future__ import annotations

import json
import lzma
import time
import tracemalloc

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support import DATA

from graphrt.errors import ChatTemplateError
from graphrt.models.chat import MAX_SOURCE, ChatTemplate, from_metadata
from graphrt.models.chat_renderer import Renderer
from graphrt.models.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b> & 'you' é"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS = r"""{{- bos_token -}}
{%- macro turn(role, text) -%}
<{{ role | upper }}>{{ text | trim }}{{ eos_token }}
{%- endmacro -%}
{%- set ns = namespace(last=-1, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content -%}
        {%- continue -%}
    {%- endif -%}
    {%- if loop.first %}first {% endif -%}
    {%- set ns.last = loop.index0 -%}
    {{- turn(message['role'], message.content) -}}
    {%- if loop.last and not loop.nextitem is defined %} last{% endif -%}
{%- endfor -%}
{%- set rest = messages[1:] | selectattr('role', 'equalto', 'user') | map(attribute='content') | list -%}
{{- rest | tojson }} {{ rest | length ~ '/' ~ messages | length }} {{ ns.last }} {{ 'x'.join(['a', 'b']) }}
{{- '%s-%d' % ('n', 3) }} {{ '{}:{}'.format('k', 1) }} {{ 'abc'.split('b')[-1] }} {{ messages[::-1][0].content }}
{%- if 'brief' in ns.system and messages[0]['role'] is string %} ok{% endif -%}
{% for key, value in {'a': 1, 'b': [1, 2]}.items() %} {{ key }}={{ value }}{% endfor %}
{% if add_generation_prompt %}<ASSISTANT>{% endif %}
"""


def plain(source: str) -> str:
    """What Jinja's own sandbox renders."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source).render(
        messages=MESSAGES, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("source", [CHATML, STEPS], ids=["chatml", "steps"])
def test_renders_as_jinja_does(source: str) -> None:
    assert ChatTemplate(source, "<s>", "</s>").render(MESSAGES) == plain(source)


def test_generation_prompt_is_optional() -> None:
    template = ChatTemplate(CHATML)
    hi = [{"role": "user", "content": "Hi"}]
    assert template.render(hi, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(hi).endswith("<|im_start|>assistant\n")


def test_generation_blocks_of_transformers_are_transparent() -> None:
    assert ChatTemplate("a{% generation %}b{{ bos_token }}{% endgeneration %}c", "<s>").render([]) == "ab<s>c"


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == time.strftime("%Y")


class Clock:
    """A clock by which every look at it takes a given time. looks: how many there were."""

    def __init__(self, step: float = 0.0) -> None:
        self.step, self.looks = step, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * self.step


def test_rendering_is_cheap() -> None:
    clock = Clock()
    Renderer(STEPS, clock=clock).render(MESSAGES, True)
    assert 0 < clock.looks < 250


def test_a_long_conversation_renders() -> None:
    long = [{"role": "user", "content": "word " * 2000}] * 300
    assert len(ChatTemplate(CHATML).render(long)) > 3_000_000


# --- errors in one to three lines


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system\nrole') }}", "refuses these messages: no system role"),
        ("\n{% if %}", "can't be compiled: line 2"),
        ("{% endfor %}", "can't be compiled: line 1"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "failed"),
        ("{{ 'a' | nosuchfilter }}", "No filter named 'nosuchfilter'"),
        ("{% include 'x' %}", "no loader"),
        ("{% import 'x' as y %}", "no loader"),
        ("x" * (MAX_SOURCE + 1), "may have 131072 characters, this one has 131073"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{% for i in [1] %}" * 40 + "{% endfor %}" * 40, "nested blocks"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_faults(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert len(str(caught.value).splitlines()) <= 3 and len(str(caught.value)) < 400


@pytest.mark.parametrize("messages", [["hi"], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_messages_must_be_messages(messages: list[dict[str, str]]) -> None:
    with pytest.raises(ChatTemplateError, match="role and content"):
        ChatTemplate(CHATML).render(messages)


# --- hostile templates

NS = "{% set ns = namespace(a=[1], b=[1], s='a', n=namespace()) %}{% for i in range(60) %}"
KEEP = (
    "{% set ns = namespace(v=1, w=1) %}{% macro f() %}{% set ns.v = varargs %}{% endmacro %}"
    "{% macro g() %}{% set ns.w = kwargs %}{% endmacro %}"
)
MANY = "{% set m = {'c': 'a' * 10**6} %}"
SELF = NS + "{% set ns.n = namespace(x=ns.n, y=ns.n) %}{% endfor %}"
#: Small at every step: only the deadline stops them.
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling by macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "tests run by select": "{% set l = range(9999) | list %}{{ l | select('in', l) | list }}",
    "tests run by reject": "{% set l = range(9999) | list %}{{ l | reject('in', l) | list }}",
    "a path of attributes": "{{ [{}] | map(attribute='a.' * 9999, default=1) | list }}",
    "slow comparisons": "{% set L = range(99999) | list %}{% for i in L %}{{ [L, L] in [L] }}{% endfor %}",
}
BOMBS = {
    "loop with output": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "captured output": "{% set x %}{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "string product": "{{ 'a' * 10**9 }}",
    "list product": "{{ range(99999) | list * 99999 }}",
    "power": "{{ 7 ** 1000000000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by +": NS + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by ~": NS + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by capture": NS + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "shared lists": NS + "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "shared namespaces printed": SELF + "{{ ns.n }}",
    "shared namespaces joined": SELF + "{{ 'x' ~ ns.n }}",
    "shared namespaces called": SELF + "{{ ns.n() }}",
    "shared namespaces formatted": SELF + "{{ '%s' % ns.n }}{{ '{}'.format(ns.n) }}",
    "width of a method": "{{ 'a'.ljust(10**9) }}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width of % behind a key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "width of % as a value": "{{ '%*d' % (10**9, 1) }}",
    "width of format": "{{ '{:1000000000}'.format(1) }}",
    "width of format as a value": "{{ '{:{}}'.format(1, 10**9) }}",
    "repeated field": "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 1000) }}{{ ('a' * 10**6).replace('a', 'b' * 1000) }}",
    "join": "{{ ('a' * 10**6) | join('b' * 1000) }}{{ ('b' * 1000).join('a' * 10**5) }}",
    "join of a generator": "{{ range(99999) | map('replace', '1', 'a' * 3000) | join }}",
    "indent": "{{ ('x\\n' * 10**6) | indent(1000) }}",
    "indent of tojson": "{{ [[[1]]] | tojson(indent=10**9) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "range": "{{ range(10**9) | list }}",
    "strftime": "{{ strftime_now('%1000000000d') }}",
    "recursive loop": "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "long sum": "{{ 1" + " + 1" * 3_000 + " }}",
    "deep arguments": KEEP + "{% for i in range(200) %}{{ f(ns.v) }}{% endfor %}",
    "shared arguments": KEEP + "{% for i in range(60) %}{{ f(ns.v, ns.v) }}{% endfor %}",
    "shared arguments by name": KEEP + "{% for i in range(60) %}{{ g(a=ns.w, b=ns.w) }}{% endfor %}",
    "loops in a list": MANY
    + "{% for i in [m, m] %}{{ ([loop] * 999) | map(attribute='previtem') | join }}{% endfor %}",
    "loop printed": "{% for i in [1] %}{{ loop }}{% endfor %}",
    "values of a dict": MANY + "{{ [m.values()] * 999 }}",
    "items of a dict": MANY + "{{ [m.items()] * 999 }}",
    "methods with their owner": "{{ [(('a' * 10**6) | safe).join] * 999 }}",
    "long numbers": "{{ [2 ** 2000] * 20000 }}",
    "replace by name": "{{ ('a' * 10**6) | replace(old='a', new='b' * 1000) }}",
    "replace by name and place": "{{ ('a' * 10**6) | replace('a', new='b' * 1000) }}",
    "replace in what is no text": "{{ range(99999) | list | replace('1', 'b' * 9999) }}",
    "join by name": "{{ range(99999) | join(d='b' * 1000) }}",
    "filter block": "{% filter replace(old='a', new='b' * 1000) %}{{ 'a' * 10**6 }}{% endfilter %}",
    "filter block by place": "{% filter replace('a', 'b' * 1000) %}{{ 'a' * 10**6 }}{% endfilter %}",
    "indent of other line ends": "{{ ('x\r' * 10**5) | indent(1000) }}",
    "indent of vertical tabs": "{{ ('x\x0b' * 10**5) | indent(width=1000) }}",
    "indent of tojson in depth": "{{ ([[[[[[[1]]]]]]] * 9999) | tojson(indent=16) }}",
    "separators of tojson": "{{ range(9999) | list | tojson(separators=('b' * 1000, ':')) }}",
    "percents": "{{ ('%' * 10**6) % () }}",
    "fills of %": "{{ ('%(a)999d' * 10**5) % {'a': 1} }}",
    "fills of format": "{{ ('{0:999}' * 10**5).format(1) }}",
    "fills of format behind a bracket": "{{ '{0[}]:9999999}'.format({'}': 1}) }}",
    "search from the right": "{{ ('a' * 10**6).rfind('ab' ~ 'a' * 10**5) }}",
    "split from the right": "{{ ('a' * 10**6).rsplit('ab' ~ 'a' * 10**5) }}",
    "stripping many": "{{ ('a' * 10**6) | trim('b' * 10**5 ~ 'a') }}",
    "pieces of a text": "{{ ('ab ' * 10**6).split() | length }}",
    "letters of a text": "{{ ('é' * 10**6) | list | length }}",
    "output of filter blocks": "{% for i in range(3) %}{% filter replace('a', 'bbb') %}"
    "{{ 'a' * 10**6 }}{% endfilter %}{% endfor %}",
}
#: Those that end by another rule than a limit of this project.
OTHERWISE = {
    "shared namespaces called": "Namespace may not be called",
    "range": "Range too big",
    "recursive loop": "maximum recursion depth exceeded",
    "long sum": "maximum recursion depth exceeded",
}


def refused(source: str, clock: Clock) -> tuple[str, int]:
    """Why a template was stopped, and the most bytes that it held."""
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError) as caught:
            Renderer(source, seconds=0.5, clock=clock).render(MESSAGES, True)
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_stopped(name: str) -> None:
    """While time stands still, so that no deadline stands in for a limit that is gone; none takes many steps."""
    clock = Clock()
    why, peak = refused(BOMBS[name], clock)
    assert OTHERWISE.get(name, "the chat template was stopped: ") in why and "it may run for" not in why
    assert clock.looks < 50_000 and peak < 100e6


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_are_stopped_by_the_deadline(name: str) -> None:
    """0.5 s, of which each step takes 50 ms."""
    clock = Clock(0.05)
    why, peak = refused(ENDLESS[name], clock)
    assert "it may run for 0.5 s, and is not done" in why
    assert 10 <= clock.looks <= 12 and peak < 100e6


def test_the_default_deadline_is_short_and_real() -> None:
    with pytest.raises(ChatTemplateError, match="may run for 1.5 s"):
        ChatTemplate(ENDLESS["nested loops"]).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ dict.fromkeys(messages) }}",
        "{{ (1).to_bytes(1, 'big') }}",
        "{{ lipsum() }}",
        "{{ cycler('a') }}",
    ],
)
def test_nothing_but_the_variables_can_be_reached(source: str) -> None:
    before = json.dumps(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(MESSAGES)
    assert json.dumps(MESSAGES) == before


# --- from a file


def test_from_metadata() -> None:
    data = json.loads(lzma.decompress((DATA / "vocab-phi-3.json.xz").read_bytes()))
    md = data["metadata"]
    tokenizer = Tokenizer.from_metadata(md)
    template = from_metadata(md, tokenizer)
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<s><|user|>\nHi<|end|>\n<|assistant|>")
    ids = tokenizer.encode(text, add_bos=False, parse_special=True)
    assert ids[0] == tokenizer.bos_id and tokenizer.eot_id in ids
    assert from_metadata({}, tokenizer) is None
    with pytest.raises(ChatTemplateError, match="must be a string, got int"):
        from_metadata({"tokenizer.chat_template": 3}, tokenizer)
