"""Java's clients of earlier years, which many programs have: those that Kafka 4 still serves."""

from __future__ import annotations

import pathlib

import pytest

from bench.peers.kafka import fetch_jars
from bench.peers.servers import Missing
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import SOURCES, Program, java_command

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>tailrace.tests</groupId><artifactId>older</artifactId><version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka-clients</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""
VERSIONS = ("2.1.1", "2.8.2", "3.4.1", "3.8.1")


@pytest.mark.long
@pytest.mark.slow_because("a Java machine compiles and runs a program")
@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_client_writes_a_transaction_and_reads_it_in_a_group(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path, version: str
) -> None:
    """3.4.1 could not connect: ApiVersions listed features at level 0. The others did not mind."""
    pom = tmp_path / "pom.xml"
    pom.write_text(POM.format(version=version))
    try:
        jars = fetch_jars(f"kafka-clients-{version}", str(pom))
    except Missing as error:
        pytest.skip(str(error))
    source = str(SOURCES / "java" / "OlderClient.java")
    command = java_command(jars, source, gateway, f"older-{version}")
    with Program(command, tmp_path) as program:
        output = program.result()
    assert "NODES 1" in output
    assert "READ 100 COMMITTED 102" in output, "a marker has an offset in each partition"
