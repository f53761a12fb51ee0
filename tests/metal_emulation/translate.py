"""Metal source as MLX generates it, to C++ for runtime.h: what macros cannot do, and rules of Metal that C++ does not have."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

SCALARS = "half|bfloat|float|char|uchar|short|ushort|int|uint|long|ulong"
SPACES = ("device", "constant", "threadgroup", "thread")

INSTANCE = re.compile(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\(.*\) (?P<name>.*);$", re.MULTILINE)
SIGNATURE = re.compile(r"\[\[kernel\]\] void (?P<name>\w+)\((?P<parameters>.*?)\) \{\n", re.DOTALL)
PARAMETER = re.compile(r"(?P<type>.*?)\s*(?P<name>\w+) \[\[(?P<attribute>[^\]]*)\]\]$", re.DOTALL)
ATTRIBUTE = re.compile(r"\[\[(?:[^\[\]]|\[[^\[\]]*\])*\]\]")
CONSTRUCTOR = re.compile(rf"(?<![\w>])(?:metal::)?({SCALARS})([234])\s*\(")
VEC_CONSTRUCTOR = re.compile(r"(?<!\w)(?:metal::)?vec<([^<>]+?),\s*(\w+)>\s*\(")
VECTOR_CAST = re.compile(rf"static_cast<\s*(?:{SCALARS})[234]\s*>|\(\s*(?:{SCALARS})[234]\s*\)\s*[\w(]")
GROUP_VARIABLE = re.compile(
    r"(?:^|(?<=[;{}\n]))(?P<lead>\s*)threadgroup\s+(?P<type>[\w:]+(?:<[^;]*?>)?)\s+(?P<declarators>[A-Za-z_][^;=*&()]*);"
)
UNQUALIFIED_LOCAL = re.compile(
    r"(?<=[;{}\n])\s*(?:const\s+)?(?:auto|[A-Za-z_][\w:]*(?:<[^;<>]*>)?)\s*(?:const\s*)?[*&]\s*(?:const\s+)?\w+\s*=[^=]"
)


class SourceError(RuntimeError):
    """The text breaks a rule of Metal that C++ does not have."""


@dataclass(frozen=True)
class Translation:
    """C++ of one kernel, for both compilations."""

    checked: str  # with -DSTRICT, never linked
    executable: str  # with an extern "C" entry `emu_entry`
    lines: tuple[str, ...]  # of the Metal text, for messages


def translate(text: str) -> Translation:
    lines = tuple(text.splitlines())
    code = without_comments(text)
    instance = INSTANCE.search(code)
    code = INSTANCE.sub("", code)
    signature = SIGNATURE.search(code)
    if signature is None:
        raise SourceError("no kernel in the generated text")
    _lint(code, signature)
    name = instance["name"] if instance else signature["name"]
    entry = _entry(name, signature)
    body_start, body_end = signature.end(), _closing(code, signature.end())
    code = code.replace("#pragma METAL fp", "#pragma clang fp")
    # Same length is not kept, lines are: messages refer to lines.
    before, body, after = code[:body_start], code[body_start:body_end], code[body_end:]
    if GROUP_VARIABLE.search(before + after):
        raise SourceError("a threadgroup variable is declared outside the kernel function; Metal allows it only there")
    variables = [m for m in GROUP_VARIABLE.finditer(body) if _depth(body, m.end("lead"))]
    if variables:
        raise SourceError(f"threadgroup variable {variables[0]['declarators']!r} is declared in a nested scope")
    count = 0

    def executable(match: re.Match[str]) -> str:
        nonlocal count
        declared = []
        for variable, extent in _declarators(match["declarators"]):
            kind = f"{match['type']}{extent}"
            pointer = f"{match['type']} (*){extent}" if extent else f"{match['type']}*"
            target = f"{match['type']} (&{variable}){extent}" if extent else f"{match['type']}& {variable}"
            declared.append(f"{target} = *reinterpret_cast<{pointer}>(emu_threadgroup({count}, sizeof({kind}), alignof({match['type']})));")
            count += 1
        return match["lead"] + " ".join(declared)

    def checked(match: re.Match[str]) -> str:
        return f"{match['lead']}extern threadgroup {match['type']} {match['declarators']};"

    def whole(replacement: str) -> str:
        joined = before + replacement + after
        joined = ATTRIBUTE.sub("", joined)
        joined = CONSTRUCTOR.sub(r"metal::emu::make<\1, \2>(", joined)
        joined = VEC_CONSTRUCTOR.sub(r"metal::emu::make<\1, \2>(", joined)
        return f'#include "runtime.h"\n#line 1 "kernel.metal"\n{joined}\n'

    return Translation(
        checked=whole(GROUP_VARIABLE.sub(checked, body)) + f"auto emu_instance = &{name};\n",
        executable=whole(GROUP_VARIABLE.sub(executable, body)) + entry,
        lines=lines,
    )


def without_comments(text: str) -> str:
    """Comments become spaces; lines stay where they are."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
    return pattern.sub(lambda m: m[0] if m[0].startswith('"') else re.sub(r"[^\n]", " ", m[0]), text)


def _entry(name: str, signature: re.Match[str]) -> str:
    arguments = []
    for text in _split(signature["parameters"]):
        parameter = PARAMETER.match(text.strip())
        if parameter is None:
            raise SourceError(f"parameter {text.strip()!r} of the kernel is not understood")
        if parameter["name"].endswith(("_shape", "_strides", "_ndim")):
            raise SourceError(f"the body uses {parameter['name']}; sizes go in as an input of their own")
        buffer = re.fullmatch(r"buffer\((\d+)\)", parameter["attribute"])
        if buffer is None:
            arguments.append(f"t->{parameter['attribute']}")
            continue
        kind = re.sub(r"\b(device|constant|threadgroup)\b", "", parameter["type"]).strip()
        address = f"b[{buffer[1]}]"
        arguments.append(f"*({kind[:-1]}*){address}" if kind.endswith("&") else f"({kind}){address}")
    return f'extern "C" EMU_PLAIN void emu_entry(void** b, const EmuThread* t) {{ (void)t; {name}({", ".join(arguments)}); }}\n'


def _declarators(text: str) -> list[tuple[str, str]]:
    """`a[4], b[2][8], c` as (name, extents)."""
    result = []
    for part in _split(text):
        match = re.fullmatch(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", part)
        if match is None:
            raise SourceError(f"threadgroup variable {part.strip()!r} is not understood")
        result.append((match[1], match[2].strip()))
    return result


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _closing(code: str, start: int) -> int:
    """Where the brace opened just before `start` closes."""
    depth = 1
    for i in range(start, len(code)):
        depth += (code[i] == "{") - (code[i] == "}")
        if depth == 0:
            return i
    raise SourceError("unbalanced braces")


def _depth(code: str, end: int) -> int:
    return code.count("{", 0, end) - code.count("}", 0, end)


# ---- Rules of Metal that C++ does not have

FORBIDDEN = re.compile(
    r"\b(?:double|long\s+long|goto|try|catch|throw|new|delete|dynamic_cast|typeid|virtual|noexcept|thread_local|register|asm|mutable)\b|\bstd::"
)
LAMBDA = re.compile(r"(?:[=(,]|\breturn)\s*\[[&=\w,\s]*\]\s*[({]")
STATIC_VARIABLE = re.compile(r"\bstatic\b(?P<declaration>[^;{}()]*?)[=;\[]")
SPACE = re.compile(rf"\b(?:{'|'.join(SPACES)})\b")


def _lint(code: str, signature: re.Match[str]) -> None:
    code = re.sub(r"^[ \t]*#[^\n]*", "", code[: signature.start()], flags=re.MULTILINE) + code[signature.start() :]
    problems = []

    def report(at: int, text: str) -> None:
        problems.append(f"kernel.metal:{code.count(chr(10), 0, at) + 1}: {text}")

    for match in FORBIDDEN.finditer(code):
        report(match.start(), f"Metal has no `{match[0]}`")
    for match in LAMBDA.finditer(code):
        report(match.start(), "Metal has no lambda expressions before version 4")
    for match in VECTOR_CAST.finditer(code):
        report(match.start(), f"{match[0]!r}: convert vectors by construction, as in float4(x)")
    for match in UNQUALIFIED_LOCAL.finditer(code):
        report(match.end() - 1, f"{match[0].strip()!r}: a pointer or reference needs an address space")
    for match in STATIC_VARIABLE.finditer(code):
        if "constant" not in match["declaration"]:
            report(match.start(), f"{match[0].strip()!r}: a static variable must be constant")
    for at, parameters in _functions(code):
        for parameter in _split(parameters):
            if re.search(r"[*&]", parameter) and not SPACE.search(parameter):
                report(at, f"{parameter.strip()!r}: a pointer or reference needs an address space")
    for at, declaration in _namespace_variables(code):
        report(at, f"{declaration!r}: a variable outside functions must be constant")
    if problems:
        raise SourceError("\n".join(problems))


def _functions(code: str) -> Iterator[tuple[int, str]]:
    """Where the parameters of each function definition begin, and their text."""
    for match in re.finditer(r"\)\s*(?:const\s*)?\{", code):
        depth, at = 1, match.start()
        while depth:
            at -= 1
            depth += (code[at] == ")") - (code[at] == "(")
        name = _name_before(code, at)
        if name and name not in ("if", "for", "while", "switch") and "[[" not in code[at : match.start()]:
            yield at, code[at + 1 : match.start()]


def _name_before(code: str, at: int) -> str:
    """The name or operator that ends before `at`; a regular expression would search from the beginning of the text, for every function."""
    end = at
    while end and code[end - 1].isspace():
        end -= 1
    start = end
    while start and (code[start - 1].isalnum() or code[start - 1] in "_]=+*/<>-"):
        start -= 1
    return code[start:end]


def _namespace_variables(code: str) -> Iterator[tuple[int, str]]:
    """Definitions with an initialiser at namespace scope that are not constant."""
    scopes: list[bool] = []  # whether each open brace is a namespace
    start = 0
    for at, character in enumerate(code):
        if character not in "{};":
            continue
        chunk = code[start:at].strip()
        if character == "{":
            scopes.append(bool(re.match(r"(?:inline\s+)?namespace\b", chunk)))
            variable = chunk.endswith("=") and all(scopes[:-1])
        else:
            variable = character == ";" and "=" in chunk and all(scopes)
        if variable and not re.match(r"using\b|template\b|static_assert\b|\}", chunk) and not re.search(r"\bconstant\b", chunk):
            yield at, chunk
        if character == "}" and scopes:
            scopes.pop()
        start = at + 1
