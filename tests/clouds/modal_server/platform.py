"""The platform behind the protocol: apps, functions, their calls, and the containers that carry them out."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modal_proto import api_pb2  # pyright: ignore[reportMissingImports]

from elastic.system.processes import inherited
from tests.clouds.modal_server.faults import Chance
from tests.clouds.modal_server.record import Container

Status = api_pb2.GenericResult
IDLE_S, TIMEOUT_S = 60, 300
"""What Modal takes where a function says nothing."""
END_TIMEOUT_S = 20.0
CONTAINER_VARIABLE = "MODAL_SERVER_CONTAINER"
"""What is started in a container bears this mark, and ends with it. A worker that ends knows another one."""
FALSE_STARTS_MAX = 3


@dataclass(eq=False)
class Input:
    """One input of a call. While it runs it is some container's; a preempted one waits again."""

    id: str
    call: "FunctionCall"
    content: api_pb2.FunctionInput
    invocation_type: int
    task: str = ""
    enqueued_s: float = 0.0
    started_s: float = 0.0
    restarts: int = 0
    output: api_pb2.FunctionGetOutputsItem | None = None
    lost: bool = False


@dataclass(eq=False)
class FunctionCall:
    id: str
    function: "Function"
    created_s: float
    cancelled: bool = False
    inputs: list[Input] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class App:
    id: str
    name: str
    deployed_s: float = 0.0
    tags: dict[str, str] = field(default_factory=dict)
    function_ids: dict[str, str] = field(default_factory=dict)
    class_ids: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Function:
    """A function or class as it was deployed, or a variant of one, with containers of its own."""

    id: str
    app: App
    definition: api_pb2.Function
    base: str = ""
    serialized_params: bytes = b""
    options: api_pb2.FunctionOptions = field(default_factory=api_pb2.FunctionOptions)
    """What a variant was asked for with."""
    queue: deque[Input] = field(default_factory=deque)
    containers: "dict[str, RunningContainer]" = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    false_starts: int = 0

    def metadata(self) -> api_pb2.FunctionHandleMetadata:
        definition = self.definition
        found = api_pb2.FunctionHandleMetadata(
            function_name=definition.function_name,
            function_type=definition.function_type,
            definition_id=f"de-{self.id}",
            class_parameter_info=definition.class_parameter_info,
            function_schema=definition.function_schema,
            supported_input_formats=definition.supported_input_formats,
            supported_output_formats=definition.supported_output_formats,
            app_id=self.app.id,
            base_function_id=self.base,
        )
        for name, method in definition.method_definitions.items():
            found.method_handle_metadata[name].CopyFrom(
                api_pb2.FunctionHandleMetadata(
                    function_name=method.function_name,
                    function_type=method.function_type,
                    is_method=True,
                    use_method_name=name,
                    function_schema=method.function_schema,
                    supported_input_formats=method.supported_input_formats,
                    supported_output_formats=method.supported_output_formats,
                    app_id=self.app.id,
                )
            )
        return found


class RunningContainer:
    """A container's process, and the inputs that it has."""

    def __init__(self, function: Function, record: Container) -> None:
        self.function = function
        self.record = record
        self.inputs: dict[str, Input] = {}
        self.cancelled: list[str] = []
        self.cancelling = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.ending: str = ""
        self.to_end = asyncio.Event()
        self.gone = asyncio.Event()
        self.leaving = asyncio.Event()


class Platform:
    """Everything that there is of one workspace. `directory` holds files, `site` is what images have on their path."""

    def __init__(self, directory: Path, site: Sequence[str]) -> None:
        self.directory = directory
        self.chance = Chance()
        self.apps: dict[str, App] = {}
        self.images: list[list[str]] = []
        """What each image that was asked for is built by."""
        self.functions: dict[str, Function] = {}
        self.calls: dict[str, FunctionCall] = {}
        self.inputs: dict[str, Input] = {}
        self.containers: dict[str, RunningContainer] = {}
        self.records: dict[str, Container] = {}
        self.mounts: dict[str, list[api_pb2.MountFile]] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.queues: dict[str, dict[bytes, deque[bytes]]] = {}
        self.volumes: dict[str, str] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.news = asyncio.Condition()
        self.url = ""
        self._site = list(site)
        self._roots: dict[str, Path] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._mark = f"modal-server-{os.getpid()}"
        self.closing = False
        for folder in ("files", "mounts", "logs", "arguments", "volumes", "blobs"):
            (directory / folder).mkdir(parents=True, exist_ok=True)

    def new_id(self, kind: str) -> str:
        return f"{kind}-{next(self._ids):022d}"

    # Calls

    def call(self, function: Function, item: api_pb2.FunctionPutInputsItem, invocation_type: int) -> Input:
        call = FunctionCall(self.new_id("fc"), function, time.time())
        put = Input(self.new_id("in"), call, item.input, invocation_type, enqueued_s=time.time())
        call.inputs.append(put)
        self.calls[call.id], self.inputs[put.id] = call, put
        self._enqueue(put)
        return put

    def _enqueue(self, put: Input) -> None:
        put.call.function.queue.append(put)
        put.call.function.arrived.set()
        self.scale(put.call.function)

    def cancel(self, call: FunctionCall, *, terminate: bool) -> None:
        """Ends its inputs; what runs them ends with `terminate`, else is told by its next heartbeat."""
        call.cancelled = True
        for put in call.inputs:
            if put.output is not None:
                continue
            container = self.containers.get(put.task)
            if put in call.function.queue:
                call.function.queue.remove(put)
                self._end_surplus(call.function)
            elif container is not None and terminate:
                self.end(container, "cancelled")
            elif container is not None:
                container.cancelled.append(put.id)
                container.cancelling.set()
                continue
            self.finish(put, Status.GENERIC_STATUS_TERMINATED, "the call was cancelled")

    def _end_surplus(self, function: Function) -> None:
        """Containers that are being started for inputs that are cancelled by now."""
        starting = [c for c in function.containers.values() if not c.record.calls and not c.ending]
        for container in starting[len(function.queue) :]:
            self.end(container, "not needed")

    def finish(self, put: Input, status: int, why: str = "") -> None:
        result = api_pb2.GenericResult(status=status, exception=why)  # type: ignore[arg-type]
        self.put_output(put, api_pb2.FunctionPutOutputsItem(input_id=put.id, result=result))

    def put_output(self, put: Input, item: api_pb2.FunctionPutOutputsItem) -> None:
        if put.output is not None:
            return
        result = item.result
        if result.status == Status.GENERIC_STATUS_SUCCESS:
            if self.chance.draw("internal_failure"):
                result = api_pb2.GenericResult(
                    status=Status.GENERIC_STATUS_INTERNAL_FAILURE, exception="the platform failed"
                )
            elif self.chance.draw("lost_output"):
                put.lost = True
        put.output = api_pb2.FunctionGetOutputsItem(
            result=result,
            idx=0,
            input_id=put.id,
            data_format=item.data_format,
            task_id=put.task,
            input_started_at=item.input_started_at or put.started_s,
            output_created_at=item.output_created_at or time.time(),
        )
        container = self.containers.get(put.task)
        if container is not None:
            container.inputs.pop(put.id, None)
        put.call.changed.set()

    # Containers

    def scale(self, function: Function) -> None:
        """Starts a container for inputs that no free one will take."""
        while not self.closing and function.queue:
            definition = function.definition
            alive = [c for c in function.containers.values() if not c.ending and not c.leaving.is_set()]
            free = sum(max(1, definition.batch_max_size) for c in alive if not c.inputs)
            most = definition.autoscaler_settings.max_containers or definition.concurrency_limit or 1000
            if free >= len(function.queue) or len(alive) >= most:
                return
            self._start(function)

    def _start(self, function: Function) -> None:
        resources = function.definition.resources
        task = self.new_id("ta")
        run = next(iter(self.parameters(function).values()), "")
        record = Container(
            task=task,
            function=function.definition.function_name,
            run=run,
            cores=resources.milli_cpu / 1000,
            memory_mb=resources.memory_mb,
            gpu=resources.gpu_config.gpu_type,
            gpus=resources.gpu_config.count,
            enqueued_s=time.time(),
        )
        self.records[task] = record
        container = RunningContainer(function, record)
        function.containers[task] = self.containers[task] = container
        self.own(self._live(container), f"container {task}")

    async def _live(self, container: RunningContainer) -> None:
        function, record = container.function, container.record
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.chance.faults.slow_start_s):
                    await container.to_end.wait()
            if not container.ending:
                record.started_s = time.time()
                container.process = await self._spawn(container)
                if container.ending:  # it was ended while it was being started
                    self._kill(container)
                code = await container.process.wait()
                record.ended_by = container.ending or f"exit {code}"
        finally:
            self._kill(container)
            record.finished_s = time.time()
            self._count_false_start(container)
            function.containers.pop(record.task, None)
            self.containers.pop(record.task, None)
            for put in list(container.inputs.values()):
                self._left_by(put, container)
            container.gone.set()
            self.scale(function)

    def _count_false_start(self, container: RunningContainer) -> None:
        """A function whose containers end before they take anything fails what waits for it."""
        function = container.function
        if container.record.calls or container.ending or container.leaving.is_set():
            function.false_starts = 0
            return
        function.false_starts += 1
        if function.false_starts >= FALSE_STARTS_MAX:
            for put in function.queue:
                self.finish(put, Status.GENERIC_STATUS_INIT_FAILURE, f"its containers {container.record.ended_by}")
            function.queue.clear()

    def _left_by(self, put: Input, container: RunningContainer) -> None:
        """An input whose container is gone: started again where that was preempted, else failed."""
        if put.output is not None:
            return
        if container.ending == "preempted" or (container.ending == "cancelled" and not put.call.cancelled):
            put.task, put.started_s, put.restarts = "", 0.0, put.restarts + 1
            self._enqueue(put)
        else:
            why = container.ending or container.record.ended_by.replace("exit", "ended with status")
            self.finish(put, Status.GENERIC_STATUS_FAILURE, f"its container {why}")

    async def _spawn(self, container: RunningContainer) -> asyncio.subprocess.Process:
        function, task = container.function, container.record.task
        arguments = api_pb2.ContainerArguments(
            task_id=task,
            function_id=function.id,
            app_id=function.app.id,
            function_def=function.definition,
            serialized_params=function.serialized_params,
            environment_name="main",
            app_layout=self.layout(function.app),
        )
        path = self.directory / "arguments" / task
        path.write_bytes(arguments.SerializeToString())
        secrets: dict[str, str] = {}
        for secret in function.definition.secret_ids:
            secrets |= self.secrets[secret]
        roots = [str(self._root(mount)) for mount in function.definition.mount_ids if self.mounts.get(mount)]
        for volume in function.definition.volume_mounts:
            self._mount_volume(volume)
        environment = inherited() | {
            "PYTHONPATH": os.pathsep.join([*roots, *self._site]),
            "MODAL_SERVER_URL": self.url,
            "MODAL_IS_REMOTE": "1",
            "MODAL_TASK_ID": task,
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(path),
            "MODAL_OVERRIDE_HEADERS": f"x-task: {task}",
            CONTAINER_VARIABLE: f"{self._mark}-{task}",
            **secrets,
        }
        log = self.directory / "logs" / f"{task}.log"
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "modal._container_entrypoint"),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self.directory,
            )

    def _root(self, mount: str) -> Path:
        """The mount's files as they lie below /root, laid out once; or where the same lie, with what is compiled of
        them."""
        if mount in self._roots:
            return self._roots[mount]
        files = {Path(file.filename).relative_to("/root"): file.sha256_hex for file in self.mounts[mount]}
        root = next((site for site in map(Path, self._site) if _holds(site, files)), self.directory / "mounts" / mount)
        if not root.exists():
            partial = root.with_suffix(".partial")
            for name, sha256 in files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(self.directory / "files" / sha256, partial / name)
            partial.rename(root)
        self._roots[mount] = root
        return root

    def _mount_volume(self, volume: api_pb2.VolumeMount) -> None:
        held = self.directory / "volumes" / volume.volume_id
        held.mkdir(exist_ok=True)
        where = Path(volume.mount_path)
        if not where.exists():
            where.parent.mkdir(parents=True, exist_ok=True)
            where.symlink_to(held)

    def end(self, container: RunningContainer, why: str) -> None:
        """Kills it, and whatever it has started."""
        container.ending = container.ending or why
        container.to_end.set()
        self._kill(container)

    def _kill(self, container: RunningContainer) -> None:
        if container.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(container.process.pid, signal.SIGKILL)
        mark = f"{CONTAINER_VARIABLE}={self._mark}-{container.record.task}".encode()
        for one in Path("/proc").iterdir():
            if one.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (one / "environ").read_bytes().split(b"\0"):
                        os.kill(int(one.name), signal.SIGKILL)

    async def take(self, container: RunningContainer, most: int, linger_s: float) -> list[Input]:
        """The next inputs for a container; none once it has been idle for its time."""
        function = container.function
        idle_s = function.definition.autoscaler_settings.scaledown_window or function.definition.task_idle_timeout_secs
        if not await self._arrival(function, idle_s or IDLE_S, lambda: bool(function.queue)):
            container.leaving.set()
            return []
        if len(function.queue) < most and linger_s:
            await self._arrival(function, linger_s, lambda: len(function.queue) >= most)
        taken: list[Input] = []
        while function.queue and len(taken) < most:
            put = function.queue.popleft()
            put.task, put.started_s = container.record.task, time.time()
            container.inputs[put.id] = put
            container.record.calls.append(put.call.id)
            taken.append(put)
            timeout_s = function.definition.timeout_secs or TIMEOUT_S
            asyncio.get_running_loop().call_later(timeout_s, self._time_out, put, container, timeout_s)
        return taken or await self.take(container, most, linger_s)

    @staticmethod
    async def _arrival(function: Function, within_s: float, there: Callable[[], bool]) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not there():
                    function.arrived.clear()
                    await function.arrived.wait()
        return there()

    def _time_out(self, put: Input, container: RunningContainer, timeout_s: float) -> None:
        if container.inputs.get(put.id) is put:
            self.finish(put, Status.GENERIC_STATUS_TIMEOUT, f"the input ran longer than {timeout_s} s")
            self.end(container, "timed out")

    # What there is

    def layout(self, app: App) -> api_pb2.AppLayout:
        layout = api_pb2.AppLayout(function_ids=app.function_ids, class_ids=app.class_ids)
        objects: set[str] = set()
        for function_id in app.function_ids.values():
            objects |= {one.object_id for one in self.functions[function_id].definition.object_dependencies}
            layout.objects.add(object_id=function_id, function_handle_metadata=self.functions[function_id].metadata())
        for object_id in sorted(objects):
            layout.objects.add(object_id=object_id)
        for name, class_id in app.class_ids.items():
            layout.objects.add(object_id=class_id, class_handle_metadata=self.class_metadata(app, name))
        return layout

    def class_metadata(self, app: App, name: str) -> api_pb2.ClassHandleMetadata:
        function = self.functions[app.function_ids[f"{name}.*"]]
        return api_pb2.ClassHandleMetadata(class_function_id=function.id, class_function_metadata=function.metadata())

    def parameters(self, function: Function) -> Mapping[str, str]:
        if not function.serialized_params:
            return {}
        found = api_pb2.ClassParameterSet()
        with contextlib.suppress(Exception):
            found.ParseFromString(function.serialized_params)
        return {p.name: p.string_value for p in found.parameters}

    def variant(self, base: Function, request: api_pb2.FunctionBindParamsRequest) -> Function:
        """The same for the same request, as Modal has it."""
        key = ("variant", f"{base.id}/{request.SerializeToString(deterministic=True).hex()}")
        if key in self.names:
            return self.functions[self.names[key]]
        options = request.function_options
        definition = api_pb2.Function()
        definition.CopyFrom(base.definition)
        for name in ("milli_cpu", "memory_mb"):
            if getattr(options.resources, name):
                setattr(definition.resources, name, getattr(options.resources, name))
        if options.resources.gpu_config.count:
            definition.resources.gpu_config.CopyFrom(options.resources.gpu_config)
        for name in ("timeout_secs", "batch_max_size", "batch_linger_ms", "max_concurrent_inputs"):
            if getattr(options, name):
                setattr(definition, name, getattr(options, name))
        if options.concurrency_limit:
            definition.autoscaler_settings.max_containers = options.concurrency_limit
        if options.task_idle_timeout_secs:
            definition.autoscaler_settings.scaledown_window = options.task_idle_timeout_secs
        for name in ("secret_ids", "volume_mounts"):
            if getattr(options, f"replace_{name}"):
                definition.ClearField(name)
                getattr(definition, name).extend(getattr(options, name))
        definition.scheduler_placement.MergeFrom(options.scheduler_placement)
        variant = Function(self.new_id("fu"), base.app, definition, base.id, request.serialized_params, options)
        self.functions[variant.id] = variant
        self.names[key] = variant.id
        return variant

    def own(self, work, name: str) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        self.closing = True
        for container in list(self.containers.values()):
            self.end(container, "the server closes")
        async with asyncio.timeout(END_TIMEOUT_S):
            for container in list(self.containers.values()):
                await container.gone.wait()
        for task in list(self._tasks):
            task.cancel()


def _holds(directory: Path, files: Mapping[Path, str]) -> bool:
    """Whether these files, by their names and SHA-256, are in a directory."""
    found = (directory / name for name in files)
    return all(
        path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
        for path, sha256 in zip(found, files.values(), strict=True)
    )
