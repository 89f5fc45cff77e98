"""Writes golden.json: what Jinja2 itself, with the settings of model authors'
tooling, renders for the templates and expressions here.

    pip install jinja2==3.1.6
    python3 golden.py
"""
import datetime, glob, json, os

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.If(nodes.Const(True), body, [], []).set_lineno(line)


class Raised(TemplateError):
    pass


def raise_exception(message):
    raise Raised(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = NOW.strftime

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather <of> a city & it's 日本",
          "parameters": {"type": "object", "required": ["city"], "properties": {
              "city": {"type": "string"}, "a": {"type": "array", "items": {"type": "integer"}}}}}}]


def say(role, content, **more):
    return dict(role=role, content=content, **more)


def call(arguments):
    return [{"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]


CHATS = [
    dict(messages=[say("user", "Hi <b> & 'q' \"d\" é 日本 😀\n\n trailing  ")]),
    dict(messages=[say("system", " be brief\n"), say("user", "one"), say("assistant", "two"), say("user", "three")]),
    dict(messages=[say("system", "s"), say("user", "q"), say("assistant", "<think>\nhm\n</think>\n\nans"),
                   say("user", "q2")], enable_thinking=False),
    dict(messages=[say("user", "q")], tools=TOOLS, date_string="1 Jan 2026"),
    dict(messages=[say("user", "q"), say("assistant", None, tool_calls=call({"city": "Paris", "x": 1.5, "b": [1, None]})),
                   say("tool", "sun", tool_call_id="abcdefghi"), say("tool", "rain", tool_call_id="abcdefghi")], tools=TOOLS),
    dict(messages=[say("user", "a"), say("user", "b")]),
    dict(messages=[say("critic", "no")]),
    dict(messages=[say("user", [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}])]),
    dict(messages=[say("user", "q"), say("assistant", "partial")], add_generation_prompt=False),
]


def case(name, source, variables):
    out = {"template": name, "vars": variables}
    try:
        out["want"] = env.from_string(source).render(**variables)
    except Raised as e:
        out["raised"] = str(e)
    except Exception:  # Jinja2 refuses it, in words of its own
        out["refused"] = True
    return out


here = os.path.dirname(os.path.abspath(__file__))
cases = []
for path in sorted(glob.glob(here + "/*.jinja")):
    for chat in CHATS:
        variables = dict(add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
        variables.update(chat)
        cases.append(case(os.path.basename(path), open(path).read(), variables))
for line in open(here + "/expressions.txt").read().splitlines():
    cases.append(case(line, line, {"d": {"k": 1, "items": "i"}}))
with open(here + "/golden.json", "w") as f:
    f.write("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "\n]\n")
