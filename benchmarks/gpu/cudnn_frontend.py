"""cuDNN's attention through its own frontend (package nvidia-cudnn-frontend), a peer of attention_peers.py.

A graph describes one call. cuDNN's heuristics name plans, which are kernels and their parameters. The fastest plan in
a short trial is taken.
"""

import cudnn
import torch

from harness import call_ms

DTYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF,
          torch.float32: cudnn.data_type.FLOAT}
HEURISTICS = [cudnn.heur_mode.A, cudnn.heur_mode.B]
REFUSALS = (RuntimeError, cudnn.cudnnGraphNotSupportedError)
TRIAL_CALLS = 4


def versions():
    return {"cudnn_frontend": cudnn.__version__, "cudnn": cudnn.backend_version()}


def tokens_first(tensor):
    """Returns a view [batch, heads, tokens, head_dim] of our [batch, tokens, heads, head_dim]."""
    return tensor.transpose(1, 2)


def heads_first(tensor):
    """Returns a copy [batch, heads, tokens, head_dim], in which a head's tokens lie together."""
    return tensor.transpose(1, 2).contiguous()


class Plan:
    """Runs one plan of a graph, which reads and writes `tensors` (by the graph's nodes)."""

    def __init__(self, name, graph, index, handle, tensors, results):
        self.name, self.graph, self.index, self.handle = name, graph, index, handle
        self.tensors, self.results = tensors, results
        graph.build_plan_at_index(index)
        self.workspace_bytes = graph.get_workspace_size_plan_at_index(index)
        self.workspace = None

    def __call__(self):
        self.graph.execute_plan_at_index(self.tensors, self.workspace, self.index, self.handle)
        return [x.transpose(1, 2) for x in self.results]


class Frontend:
    """Computes attention of a Case's tensors, each time by the fastest plan.

    layouts: tokens_first, heads_first or both. With both, the faster one is taken."""

    def __init__(self, case, layouts=(tokens_first,)):
        self.case, self.layouts = case, layouts
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.inputs = {layout: [layout(x) for x in (case.q, case.k, case.v, case.dout)] for layout in layouts}
        self.stats = torch.empty((case.batch, case.heads, case.tokens, 1), device=case.q.device)
        self._forward = None

    def forward(self):
        """Returns the Plan that computes out, and fills in the statistics."""
        if self._forward:
            return self._forward
        plans = []
        known = set()
        # AUTO leaves out COMPOSITE's kernels where cuDNN has others.
        for implementation in (cudnn.attention_implementation.AUTO, cudnn.attention_implementation.COMPOSITE):
            for layout, (q, k, v, dout) in self.inputs.items():
                out = torch.empty_like(dout)
                plans += self._plans(
                    "sdpa", layout, {"q": q, "k": k, "v": v}, [out, self.stats], known,
                    generate_stats=True, implementation=implementation)
        self._forward = self._fastest(plans)
        return self._forward

    def backward(self, deterministic):
        """Returns the Plan that computes dq, dk and dv."""
        out = self.forward()()[0].contiguous()
        plans = []
        for layout, (q, k, v, dout) in self.inputs.items():
            tensors = {"q": q, "k": k, "v": v, "o": layout(out), "dO": dout, "stats": self.stats}
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            plans += self._plans("sdpa_backward", layout, tensors, gradients, set(),
                                 use_deterministic_algorithm=deterministic)
        return self._fastest(plans)

    def _plans(self, operation, layout, inputs, outputs, known, **arguments):
        """Returns the plans of a graph of one operation, without those of `known` names."""
        plans = []
        try:
            graph, tensors = self._graph(operation, inputs, outputs, **arguments)
        except REFUSALS as error:
            print(f"{self.case.label}: cuDNN refuses {operation} {layout.__name__} {arguments}: {str(error)[:500]}",
                  flush=True)
            return plans
        for index in range(graph.get_execution_plan_count()):
            name = f"{graph.get_plan_name_at_index(index)} {layout.__name__}"
            if name in known:  # both heuristics may name a plan
                continue
            known.add(name)
            try:
                plans.append(Plan(name, graph, index, self.handle, tensors, outputs))
            except Exception as error:  # a plan may need what the machine lacks
                print(f"{self.case.label}: plan {name} is left out: {type(error).__name__}: {str(error)[:300]}",
                      flush=True)
        return plans

    def _graph(self, operation, inputs, outputs, **arguments):
        """Returns a graph that writes `outputs`, and all tensors by its nodes."""
        graph = cudnn.pygraph(
            handle=self.handle, io_data_type=DTYPES[self.case.q.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
        nodes = {name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()),
                                    data_type=DTYPES[x.dtype]) for name, x in inputs.items()}
        if self.case.mask == "causal":
            arguments.update(diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, diagonal_band_right_bound=0)
        results = getattr(graph, operation)(**nodes, attn_scale=self.case.scale, **arguments)
        tensors = {nodes[name]: x for name, x in inputs.items()}
        for node, x in zip(results, outputs):
            node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
            node.set_data_type(DTYPES[x.dtype])
            tensors[node] = x
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(HEURISTICS)
        return graph, tensors

    def _fastest(self, plans):
        if not plans:
            raise RuntimeError(f"{self.case.label}: cuDNN must offer a plan that can be built; got none")
        workspace = torch.empty(max(16, *(plan.workspace_bytes for plan in plans)), dtype=torch.uint8,
                                device=self.case.q.device)
        milliseconds = {}
        for plan in plans:
            plan.workspace = workspace
            plan()
            milliseconds[plan] = call_ms(plan, TRIAL_CALLS)
        print(f"{self.case.label}: cuDNN's plans, ms: " +
              ", ".join(f"{plan.name} {ms:.3f}" for plan, ms in milliseconds.items()), flush=True)
        return min(milliseconds, key=milliseconds.get)
