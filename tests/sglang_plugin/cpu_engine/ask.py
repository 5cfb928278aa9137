"""An engine in a process of its own: `python ask.py JOB ANSWERS`.

A job is a JSON object: the `model`, arguments of the `engine`, and a list of things `to_do`, each
either a choice for the idle server (`configure`) or `prompts` with their `sampling` parameters.
With `record`, a folder, the server is recorded as the benchmark would do it.
Answers are a JSON list for each list of prompts. They are in the file before the engine goes: when
it does, SGLang ends this process too.
"""

import json
import sys
import time
from pathlib import Path

from granikv.validate.servers import Variant, serving

_RECORDED_S = 1.5  # the recorder writes twice a second, and SGLang kills its processes


def main(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    said = []
    record = Path(job["record"]) if job["record"] else None
    with serving(Variant("asked", job["engine"]), job["model"], record) as server:
        for task in job["to_do"]:
            if "configure" in task:
                server.run(server.client.flush())  # waits until the server is idle
                server.run(server.client.configure(task["configure"]))
            else:
                answers = server.client.generate(task["prompts"], task["sampling"])
                said.append([_answer(one) for one in answers])
        time.sleep(_RECORDED_S)
        Path(answers_file).write_text(json.dumps(said))


def _answer(answer: dict) -> dict:
    meta = answer["meta_info"]
    chosen = meta["output_token_logprobs"]
    return {
        "rid": meta["id"],
        "tokens": [token for _, token, _ in chosen],
        "logprobs": [logprob for logprob, _, _ in chosen],
        "cached_tokens": meta["cached_tokens"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
