"""Grammars of replies that may call strict tools, in formats that are not JSON alone: tags, Python, DeepSeek's marks, channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.parsing import deepseek as ds
from octavo.frontend.parsing import harmony
from octavo.frontend.parsing import pythonic as python
from octavo.frontend.parsing import qwen_xml as xml
from octavo.frontend.parsing.guard_arguments import Argument, arguments_of, in_order, quoted
from octavo.frontend.parsing.schemas import CannotGuard, arguments_rule, needs_arguments

Tools = Sequence[Mapping[str, Any]]
Special = Mapping[str, int]

_TERMINALS = r"""
TEXT: /(.|\n)*/
BLANKS: /[\s\x1c-\x1f]*/
SPACE: /[ \n\r\t]{1,40}/
"""


def _any_of(texts: Sequence[str]) -> str:
    return "(" + " | ".join(map(quoted, texts)) + ")"


def _mark(text: str, special: Special) -> str:
    return f"<[{special[text]}]>" if text in special else quoted(text)


def _free(marks: Sequence[str], special: Special) -> str:
    return "".join(f" | FREE <[{special[mark]}]>" for mark in marks if mark in special)


def tags(tools: Tools, special: Special) -> str:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>. See `QwenXmlCalls`."""
    rules, calls = [], []
    for i, tool in enumerate(tools):
        parameters = []
        for k, argument in enumerate(arguments_of(tool, "as tags")):
            parameters.append((f"parameter_{i}_{k}", argument.required))
            rules += _parameter(f"parameter_{i}_{k}", argument)
        rules.append(f'begin_{i}[lazy]: TEXT {quoted(xml.FUNCTION)} BLANKS {quoted(str(tool["name"]))} BLANKS ">"')
        calls.append(f"begin_{i} {in_order(parameters)} SPACE? {quoted(xml.FUNCTION_END)}")
    free = _free((xml.CALL, xml.CALL_END), special)
    return "\n".join([f"start: ({' | '.join(calls)}{free})* FREE", "FREE: TEXT", _TERMINALS, *rules])


def _parameter(rule: str, argument: Argument) -> list[str]:
    begin = f"SPACE? {quoted(f'{xml.PARAMETER}{argument.name}>')}"
    end = quoted(xml.PARAMETER_END)
    if argument.schema.get("type") != "string":
        return [f"{rule}: {begin} SPACE? {argument.json} SPACE? {end}"]
    argument.check_text("as tags")
    texts = argument.texts
    if texts is not None:  # a line break on each side belongs to the layout
        return [f'{rule}: {begin} "\\n" {_any_of(texts)} "\\n" {end}'] if texts else [f"{rule}: {begin} /[^\\s\\S]/"]
    least, most = argument.schema.get("minLength"), argument.schema.get("maxLength")
    if least is None and most is None:
        return [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: TEXT {end}"]
    size = f"{{{least or 0},{'' if most is None else most}}}"
    return [
        f'{rule}: {begin} "\\n" {rule}_text',
        f'{rule}_text[lazy]: (/(.|\\n){size}/ & ~{rule.upper()}_END) "\\n" {end}',
        f"{rule.upper()}_END: TEXT {end} TEXT",
    ]


def python_list(tools: Tools, special: Special) -> str:
    """[NAME(KEY=VALUE, ...), ...], at the beginning or behind a marker. See `PythonicCalls`."""
    rules, calls, names = [], [], []
    heads: dict[str, list[str]] = {"first": [], "marked": []}
    start_mark = special.get(python.START)
    behind = "BLANKS" if start_mark is not None else f"FREE {quoted(python.START)} BLANKS"
    bad = "" if start_mark is not None else f" | TEXT {quoted(python.START)} BLANKS"
    for i, tool in enumerate(tools):
        name = str(tool["name"])
        if not python.NAME.fullmatch(name):
            continue  # cannot be written so
        names.append(name)
        arguments = [a for a in arguments_of(tool, "as Python") if _usable(a)]
        for k, argument in enumerate(arguments):
            rules.append(f"value_{i}_{k}: {_value(argument)}")
        chain = [(f'{quoted(a.name)} SPACE? "=" SPACE? value_{i}_{k}', a.required) for k, a in enumerate(arguments)]
        firsts = []
        for k, argument in enumerate(arguments):
            rest = f'value_{i}_{k} {in_order(chain[k + 1 :], "COMMA")} SPACE? ")"'
            firsts.append(f'{quoted(argument.name)} SPACE? "=" SPACE? {rest}')
            for where, prefix in (("first", "BLANKS"), ("marked", behind)):
                rules.append(
                    f'{where}_{i}_{k}[lazy]: ({prefix} "[" BLANKS {quoted(name)} / */ "(" PY_BLANKS {quoted(argument.name)} PY_BLANKS "=")'
                )
                heads[where].append(f"{where}_{i}_{k} SPACE? {rest}")
            if argument.required:
                break
        else:
            firsts.append('")"')
        if not needs_arguments(tool.get("parameters")):
            for where, prefix in (("first", "BLANKS"), ("marked", behind)):
                rules.append(f'{where}_{i}[lazy]: {prefix} "[" BLANKS {quoted(name)} / */ "(" PY_BLANKS ")"')
                heads[where].append(f"{where}_{i}")
        calls.append(f'{quoted(name)} "(" SPACE? ({" | ".join(firsts)})')
    if not calls:
        return f"start: FREE{_free((python.START, python.END), special)}\nFREE: TEXT\n{_TERMINALS}"
    tail = '(COMMA call)* SPACE? "]"'
    marked = f"({' | '.join(heads['marked'])}) {tail}"
    if start_mark is not None:
        marked = f"FREE <[{start_mark}]> {marked}"
    free = _free((python.START, python.END), special)
    return "\n".join(
        [
            f"start: (({' | '.join(heads['first'])}) {tail})? ({marked}{free})* FREE",
            "FREE: TEXT & ~BAD",
            f'BAD: (BLANKS{bad}) "[" BLANKS {_any_of(names)} / */ "(" PY_BLANKS /[^\\W\\d]\\w*/ PY_BLANKS "=" TEXT',
            "PY_BLANKS: /[ \\t\\r\\n]*/",
            "COMMA: /[ \\t\\r\\n]{0,40},[ \\t\\r\\n]{0,40}/",
            f"call: {' | '.join(calls)}",
            _TERMINALS,
            *rules,
        ]
    )


def _usable(argument: Argument) -> bool:
    if argument.name.isidentifier() and argument.name not in python.KEYWORDS:
        return True
    if argument.required and not argument.lenient:
        raise CannotGuard(
            f"{argument.where}: {argument.name} cannot be the name of an argument in calls written as Python; leave out strict."
        )
    return False


def _value(argument: Argument) -> str:
    """JSON, which Python's literals include but for its constants; and how Python has it, where that is simple."""
    kind, forms = argument.schema.get("type"), [argument.json]
    if kind == "boolean" and not argument.schema.keys() & {"enum", "const"}:
        forms += ['"True"', '"False"']
    elif kind == "null":
        forms.append('"None"')
    elif kind == "string" and (texts := argument.texts) is not None:
        forms += [quoted(repr(text)) for text in texts if repr(text)[0] == "'"]
    elif kind == "string" and not argument.schema.keys() & {"minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "allOf"}:
        forms.append("/'([^'\\\\\\n\\r]|\\\\['\"\\\\nrt])*'/")
    return " | ".join(forms)


def deepseek_calls(tools: Tools, special: Special) -> str:
    """A name and JSON between marks, with the JSON in a code block or not. See `DeepSeekCalls`."""
    begin, separator, end = (_mark(mark, special) for mark in (ds.CALL_BEGIN, ds.SEPARATOR, ds.CALL_END))
    marks = ds.CALL_BEGIN in special and ds.SEPARATOR in special
    rules, calls, fenced = [], [], []
    for i, tool in enumerate(tools):
        rules.append(arguments_rule(i, tool))
        name = quoted(str(tool["name"]))
        block = f'SPACE? arguments_{i} SPACE? "```" SPACE? {end}'
        if marks:
            rules.append(f"NAME_{i}: BLANKS {name} BLANKS")
            rules.append(f'FENCED_{i}: BLANKS {name} BLANKS "```json"')
            calls.append(f"FREE {begin} NAME_{i} {separator} SPACE? arguments_{i} SPACE? {end}")
            fenced.append(f"FENCED_{i} {block}")
        else:
            rules.append(f"begin_{i}[lazy]: TEXT {begin} BLANKS {name} BLANKS {separator}")
            rules.append(f'fenced_{i}[lazy]: TEXT {begin} HEADER {separator} BLANKS {name} BLANKS "```json"')
            calls.append(f"begin_{i} SPACE? arguments_{i} SPACE? {end}")
            calls.append(f"fenced_{i} {block}")
    if marks:
        calls.append(f"FREE {begin} TEXT {separator} ({' | '.join(fenced)})")
    free = _free((ds.CALLS_BEGIN, ds.CALLS_END, ds.CALL_BEGIN, ds.CALL_END), special)
    header = f"HEADER: TEXT & ~(TEXT {quoted(ds.SEPARATOR)} TEXT)"
    return "\n".join([f"start: ({' | '.join(calls)}{free})* FREE", "FREE: TEXT", header, _TERMINALS, *rules])


def channels_to_answer(tools: Tools, special: Special, answer: str) -> str:
    """Messages as in `channels`, of which the final one is an answer; or the last is a call.

    Args:
        answer: the rule of that name, and those it needs.

    Raises:
        CannotGuard: the marks are no tokens of this tokenizer, so that any text might hold one.
    """
    marks = (harmony.CHANNEL, harmony.MESSAGE, harmony.START, "<|end|>")
    if any(mark not in special for mark in marks):
        raise CannotGuard("Strict tools cannot be combined with a response_format here, since channels are no tokens of this model's.")
    channel, message, start, end = (f"<[{special[mark]}]>" for mark in marks)
    constrain = f" (<[{special[harmony.CONSTRAIN]}]> /[ ]*json[ ]*/)?" if harmony.CONSTRAIN in special else ""
    rules, calls, calls_by_role = [], [], []
    for i, tool in enumerate(tools):
        rules.append(arguments_rule(i, tool))
        to = f'"to=" "functions."? {quoted(str(tool["name"]))}'
        rules += [f"CALL_{i}: /[ ]*(commentary|analysis)[ ]+/ {to} /([ ]+(json|code)?[ ]*)?/", f"TO_{i}: /[ ]+/ {to} / */"]
        calls.append(f"{channel} CALL_{i}{constrain} {message} SPACE? arguments_{i} SPACE?")
        calls_by_role.append(f"TO_{i} {channel} CALL{constrain} {message} SPACE? arguments_{i} SPACE?")
    over = " | ".join(f"<[{special[mark]}]>" for mark in ("<|end|>", "<|call|>") if mark in special)
    return "\n".join(
        [
            f"start: last | thought {end} next | call ({over}) next",
            f'next: {start} "assistant" (start | call_by_role (({over}) next)?)',
            f"last: call | {channel} FINAL{constrain} {message} SPACE? answer SPACE?",
            f"thought: {channel} THOUGHT {message} TEXT",
            f"call: {' | '.join(calls)}",
            f"call_by_role: {' | '.join(calls_by_role)}",
            "THOUGHT: /[ ]*(analysis|commentary)[ ]*/",
            "CALL: /[ ]*(commentary|analysis)[ ]*((json|code)[ ]*)?/",
            "FINAL: /[ ]*final[ ]*(json[ ]*)?/",
            _TERMINALS,
            *rules,
            answer,
        ]
    )


def channels(tools: Tools, special: Special) -> str:
    """Messages with headers, of which those to a function are calls. See `HarmonyParser`."""
    channel, message = harmony.CHANNEL, harmony.MESSAGE
    rules, calls, free, end = [], [], "", ""
    for i, tool in enumerate(tools):
        rules.append(arguments_rule(i, tool))
        to = f'"to=" "functions."? {quoted(str(tool["name"]))}'
        if channel in special and message in special:
            rules.append(f"CALL_{i}: /[ ]*(commentary|analysis)[ ]+/ {to} /([ ]+(json)?[ ]*)?/")
            constrain = f" (<[{special[harmony.CONSTRAIN]}]> /[ ]*json[ ]*/)?" if harmony.CONSTRAIN in special else ""
            role = f"(<[{special[harmony.START]}]> NO_CALL)? " if harmony.START in special else ""
            calls.append(f"FREE {role}<[{special[channel]}]> CALL_{i}{constrain} <[{special[message]}]> SPACE? arguments_{i}")
            if harmony.START in special:
                rules.append(f"ROLE_{i}: /[ ]*assistant[ ]+/ {to} / */")
                calls.append(
                    f"FREE <[{special[harmony.START]}]> ROLE_{i} <[{special[channel]}]> /[ ]*(commentary|analysis)[ ]*(json[ ]*)?/{constrain} "
                    f"<[{special[message]}]> SPACE? arguments_{i}"
                )
        else:
            rules.append(
                f"begin_{i}[lazy]: (TEXT ({quoted(channel)} | {quoted(harmony.START)}) NO_MESSAGE {to} /[^\\w.\\-]/ NO_MESSAGE | "
                f"TEXT ({quoted(channel)} | {quoted(harmony.START)}) NO_MESSAGE {to}) {quoted(message)}"
            )
            calls.append(f"begin_{i} SPACE? arguments_{i}")
    if channel in special and message in special:
        # A header without a function, and its message.
        free = f" | FREE <[{special[channel]}]> NO_CALL <[{special[message]}]>"
        free += _free([mark for mark in ("<|end|>", "<|call|>", "<|return|>") if mark in special], special)
        if harmony.START in special:
            beginning = f"<[{special[harmony.START]}]> NO_CALL"
            free += f" | FREE {beginning} (<[{special[channel]}]> NO_CALL)? <[{special[message]}]>"
            end = f" ({beginning})?"
    rules.append(f"NO_MESSAGE: TEXT & ~(TEXT {quoted(message)} TEXT)")
    rules.append("NO_CALL: TEXT & ~(TEXT /to=[\\w.\\-]/ TEXT)")
    call = f"({' | '.join(calls)}) SPACE?"
    # Arguments go on up to the end of their message, which the last one may lack.
    ends = " | ".join(_mark(mark, special) for mark in harmony.ENDS)
    start = f"start: ({call} ({ends}){free})* (FREE{end} | {call})"
    return "\n".join([start, "FREE: TEXT", _TERMINALS, *rules])
