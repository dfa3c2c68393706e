"""The JSON of results that were measured on a CPU next to PyTorch."""

import datetime
import json
import platform

import torch


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(path, rows, **more):
    """Writes the rows, the processor and the versions as JSON. Without a path it writes nothing."""
    if not path:
        return
    head = {"date": datetime.date.today().isoformat(), "processor": processor(), "torch": torch.__version__,
            "pytorch_capability": torch.backends.cpu.get_cpu_capability(), **more}
    with open(path, "w", encoding="utf-8") as file:
        file.write("{\n" + "".join(" %s: %s,\n" % (json.dumps(k), json.dumps(v)) for k, v in head.items()) +
                   ' "rows": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]\n}\n")
