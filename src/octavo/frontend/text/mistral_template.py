"""The chat template of Mistral's models whose folder has a tekken.json and none: the format follows from the file's version.

Mistral publishes such folders for its own library (mistral-common), which holds the formats instead of templates. What a version changes:
3 puts the system prompt in front of the last user's text; 7 gives it marks of its own; 11 names each call behind a mark; from 13 on, tools
come with the first user's text and calls have no ids.
"""

from __future__ import annotations

import re
from typing import Final

NEWEST: Final = 13
"""The format that later versions are taken to have too."""

_TEXT: Final = "{{ text(message.content) }}"
_START: Final = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}
{%- elif content %}{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- set ns = namespace(first=-1, last=-1, system='') -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if ns.first < 0 %}{% set ns.first = loop.index0 %}{% endif %}{% set ns.last = loop.index0 %}
{%- elif message.role not in ('system', 'assistant', 'tool') -%}
{{- raise_exception('Roles are system, user, assistant and tool, not ' ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
"""
_TOOLS: Final = """\
{%- if tools and loop.index0 == ns.POSITION -%}
[AVAILABLE_TOOLS][
{%- for tool in tools -%}
{%- set f = tool.function -%}
{"type": "function", "function": {"name": {{ f.name | tojson }}, "description": {{ (f.description or '') | tojson }}, "parameters": \
{{ (f.parameters or {}) | tojson }}}}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
][/AVAILABLE_TOOLS]
{%- endif -%}
"""
_ARGUMENTS: Final = "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
_LISTED: Final = (
    """\
[TOOL_CALLS][
{%- for call in message.tool_calls -%}
{"name": {{ call.function.name | tojson }}, "arguments": """
    + _ARGUMENTS
    + """
{%- if call.id and call.id != 'null' %}, "id": {{ call.id | tojson }}{% endif %}}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
]"""
)
_NAMED: Final = "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}CALL_ID[ARGS]" + _ARGUMENTS + "{% endfor %}"
_CALL_ID: Final = "{% if call.id and call.id != 'null' %}[CALL_ID]{{ call.id }}{% endif %}"
_RESULT_AS_JSON: Final = """\
{%- set result = text(message.content) -%}
[TOOL_RESULTS]{"content": {{ result if result[:1] in ('{', '[') else result | tojson }}, "call_id": {{ message.tool_call_id | tojson }}}\
[/TOOL_RESULTS]"""


def mistral_template(version: str, special: frozenset[str]) -> str:
    """
    Args:
        version: of tekken.json ("v7").
        special: the special tokens of the vocabulary; a model that thinks has marks for it.
    """
    number = min(int(found[0]), NEWEST) if (found := re.search(r"\d+", version)) else 3
    thinks = "[THINK]" in special and "[/THINK]" in special
    marked = number >= 7
    system = f"[SYSTEM_PROMPT]{_TEXT}[/SYSTEM_PROMPT]" if marked else "{% set ns.system = ns.system ~ text(message.content) ~ '\\n\\n' %}"
    user = _TEXT if marked else "{% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}" + _TEXT
    thought = "{% if message.reasoning_content %}[THINK]{{ message.reasoning_content }}[/THINK]{% endif %}" if thinks else ""
    said = "{{ text(message.content).rstrip(' ') }}"
    calls = _LISTED if number < 11 else _NAMED.replace("CALL_ID", _CALL_ID if number < 13 else "")
    result = _RESULT_AS_JSON
    if marked:
        named = "{{ message.tool_call_id }}[TOOL_CONTENT]" if number < 13 else ""
        result = f"[TOOL_RESULTS]{named}{_TEXT}[/TOOL_RESULTS]"
    tools = _TOOLS.replace("POSITION", "first" if number >= 13 else "last")
    both = f"{said}{{% if message.tool_calls %}}{calls}{{% endif %}}"
    either = f"{{% if message.tool_calls %}}{calls}{{% else %}}{said}{{% endif %}}"
    return (
        f"{_START}"
        "{%- for message in messages -%}\n"
        f"{{%- if message.role == 'system' -%}}\n{system}\n"
        f"{{%- elif message.role == 'user' -%}}\n{tools}[INST]{user}[/INST]\n"
        f"{{%- elif message.role == 'assistant' -%}}\n{thought}{both if marked else either}{{{{ eos_token }}}}\n"
        f"{{%- elif message.role == 'tool' -%}}\n{result}\n"
        "{%- endif -%}\n{%- endfor -%}\n"
    )
