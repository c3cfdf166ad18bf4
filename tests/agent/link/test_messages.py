"""That the messages of agents were made from their .proto file as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from otel_ddp.agent.link import link_pb2


def of_field(told: FieldDescriptorProto) -> tuple[str, str, str, str]:
    """How often it may be there, its type, name and number."""
    often = "repeated " if told.label == FieldDescriptorProto.LABEL_REPEATED else ""
    kind = told.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(told.type)
    kind = kind.removeprefix("TYPE_").lower()
    return "optional " if told.proto3_optional else often, kind, told.name, str(told.number)


def test_the_generated_messages_are_those_of_the_proto_file() -> None:
    proto = Path(str(link_pb2.__file__).replace("_pb2.py", ".proto")).read_text()
    fields = re.findall(r"^ +(repeated |optional |)(\w+) (\w+) = (\d+);", proto, re.MULTILINE)
    kinds = re.findall(r"^ +(\w+) = (\d+);", proto, re.MULTILINE)

    file: Any = FileDescriptorProto()
    link_pb2.DESCRIPTOR.CopyToProto(file)
    assert [each.name for each in file.message_type] == re.findall(
        r"^message (\w+) {", proto, re.MULTILINE
    )
    found = [of_field(each) for message in file.message_type for each in message.field]
    assert found == [(often, kind.lower(), name, number) for often, kind, name, number in fields]
    assert [(name, str(at)) for name, at in link_pb2.Question.Kind.items()] == kinds


def test_the_generated_code_takes_every_runtime_that_opentelemetrys_takes() -> None:
    assert "# Protobuf Python Version: 5.26" in Path(str(link_pb2.__file__)).read_text()
