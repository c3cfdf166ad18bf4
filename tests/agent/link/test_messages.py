"""That the messages of agents were made from their .proto file as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from otel_ddp.agent.link import link_pb2


def words(text: str) -> list[str]:
    return re.findall(r'[\w.]+|"[^"]*"|[^\s\w]', re.sub(r"//.*", "", text))


def of_field(field: FieldDescriptorProto, package: str) -> str:
    kinds = FieldDescriptorProto.Type
    kind = field.type_name.removeprefix(f".{package}.") or kinds.Name(field.type)
    kind = kind.removeprefix("TYPE_").lower() if not field.type_name else kind.rpartition(".")[2]
    before = "optional " if field.proto3_optional else ""
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        before = "repeated "
    return f"{before}{kind} {field.name} = {field.number};"


def of_enum(enum: EnumDescriptorProto) -> Iterator[str]:
    yield f"enum {enum.name} {{"
    yield from (f"{each.name} = {each.number};" for each in enum.value)
    yield "}"


def of_message(message: DescriptorProto, package: str) -> Iterator[str]:
    """Enums, then messages, then fields: so they stand in the file."""
    yield f"message {message.name} {{"
    for enum in message.enum_type:
        yield from of_enum(enum)
    for nested in message.nested_type:
        yield from of_message(nested, package)
    yield from (of_field(each, package) for each in message.field)
    yield "}"


def as_text(descriptor: Any) -> str:
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    lines = [f'syntax = "{file.syntax}";', f"package {file.package};"]
    for enum in file.enum_type:
        lines += of_enum(enum)
    for message in file.message_type:
        lines += of_message(message, file.package)
    return "\n".join(lines)


def test_the_generated_messages_are_those_of_the_proto_file() -> None:
    proto = Path(str(link_pb2.__file__).replace("_pb2.py", ".proto"))

    assert words(proto.read_text()) == words(as_text(link_pb2.DESCRIPTOR))


def test_the_generated_code_takes_every_runtime_that_opentelemetrys_takes() -> None:
    assert "# Protobuf Python Version: 5.26" in Path(str(link_pb2.__file__)).read_text()
