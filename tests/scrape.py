"""The worker's metrics, as Prometheus reads them."""

from dataclasses import dataclass
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Page:
    names: frozenset[str]  # of the metrics, counters without their `_total`
    samples: tuple[Sample, ...]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels. One that is not there is no zero."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"there is no {name} with {labels}"
        return sum(found)


def scrape(port: int, host: str = "127.0.0.1") -> Page:
    with urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    families = [family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")]
    return Page(
        frozenset(family.name for family in families), tuple(sample for family in families for sample in family.samples)
    )
