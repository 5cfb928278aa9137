"""GraniKV inside an unmodified SGLang 0.5.17, on the classes that the simulator uses."""
