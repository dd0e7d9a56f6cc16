"""The calls of Modal's protocol that its client and its containers make here, one method each."""

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status  # pyright: ignore[reportMissingImports]
from modal._utils.grpc_testing import patch_mock_servicer  # pyright: ignore[reportMissingImports]
from modal_proto import api_pb2  # pyright: ignore[reportMissingImports]
from modal_proto.api_grpc import ModalClientBase  # pyright: ignore[reportMissingImports]

from tests.clouds.modal_server.platform import App, Function, FunctionCall, Input, Platform, RunningContainer

TOKEN = ("ak-local", "as-local")
"""The credentials that are let in."""
BUILDER_VERSION = "2025.06"
ENVIRONMENT = "main"
LONG_POLL_S = 55.0
REMEMBERED = 4096


class Servicer:
    """`calls` counts what was asked for, by name. Torn answers are kept by their keys: who asks again hears them."""

    def __init__(self, platform: Platform, blob_url: str) -> None:
        self._platform = platform
        self._blob_url = blob_url
        self._answers: dict[tuple[str, str], Any] = {}
        self.calls: dict[str, int] = {}
        self.refuse_token = False

    # Who asks

    def container(self, stream: Any) -> RunningContainer:
        found = self._platform.containers.get(str(stream.metadata.get("x-task", "")))
        if found is None:
            raise GRPCError(Status.NOT_FOUND, "no such container")
        return found

    async def answer(self, name: str, stream: Any, request: Any) -> Any:
        """What `do_NAME` says, with the faults of the day."""
        chance = self._platform.chance
        self.calls[name] = self.calls.get(name, 0) + 1
        in_container = "x-task" in stream.metadata
        if not in_container and (
            self.refuse_token or stream.metadata.get("x-modal-token-secret") not in (TOKEN[1], None)
        ):
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        key = (name, str(stream.metadata.get("x-idempotency-key", "")))
        if key in self._answers:
            return self._answers[key]
        if getattr(request, "environment_name", "") not in ("", ENVIRONMENT):
            raise GRPCError(Status.NOT_FOUND, f"Environment {request.environment_name!r} not found")
        if not in_container and chance.draw("unavailable", name):
            raise GRPCError(Status.UNAVAILABLE, "a fault that was asked for")
        said = await getattr(self, f"do_{name}")(stream, request)
        if not in_container and chance.faults.late_s and name in chance.faults.rpcs:
            await asyncio.sleep(chance.faults.late_s)
        if not in_container and chance.draw("torn", name):
            self._answers[key] = said
            if len(self._answers) > REMEMBERED:
                del self._answers[next(iter(self._answers))]
            raise GRPCError(Status.UNAVAILABLE, "a torn answer that was asked for")
        return said

    # Clients and deployments

    async def do_ClientHello(self, stream: Any, request: Any) -> Any:
        return api_pb2.ClientHelloResponse(image_builder_version=BUILDER_VERSION)

    async def do_AuthTokenGet(self, stream: Any, request: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token="e30.eyJleHAiOjQxMDI0NDQ4MDB9.x")

    async def do_EnvironmentGetOrCreate(self, stream: Any, request: Any) -> Any:
        metadata = api_pb2.EnvironmentMetadata(
            name=ENVIRONMENT, settings=api_pb2.EnvironmentSettings(image_builder_version=BUILDER_VERSION)
        )
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def do_AppGetByDeploymentName(self, stream: Any, request: Any) -> Any:
        app = self._app(request.name)
        return api_pb2.AppGetByDeploymentNameResponse(app_id=app.id if app else "", environment_name=ENVIRONMENT)

    async def do_AppCreate(self, stream: Any, request: Any) -> Any:
        app = App(self._platform.new_id("ap"), request.description, tags=dict(request.tags))
        self._platform.apps[app.id] = app
        return api_pb2.AppCreateResponse(app_id=app.id, app_page_url="http://local", app_logs_url="http://local")

    async def do_AppGetOrCreate(self, stream: Any, request: Any) -> Any:
        app = self._app(request.app_name)
        if app is None:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_name!r} not found in environment 'main'")
        return api_pb2.AppGetOrCreateResponse(app_id=app.id)

    async def do_AppPublish(self, stream: Any, request: Any) -> Any:
        app = self._platform.apps[request.app_id]
        app.name, app.deployed_s = request.name or app.name, time.time()
        app.tags = dict(request.tags)
        app.function_ids, app.class_ids = dict(request.function_ids), dict(request.class_ids)
        return api_pb2.AppPublishResponse(url="http://local", deployed_at=app.deployed_s)

    async def do_AppGetTags(self, stream: Any, request: Any) -> Any:
        return api_pb2.AppGetTagsResponse(tags=self._platform.apps[request.app_id].tags)

    async def do_AppHeartbeat(self, stream: Any, request: Any) -> Any:
        return Empty()

    async def do_AppClientDisconnect(self, stream: Any, request: Any) -> Any:
        return Empty()

    async def do_ImageGetOrCreate(self, stream: Any, request: Any) -> Any:
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        self._platform.images.append(list(request.image.dockerfile_commands))
        return api_pb2.ImageGetOrCreateResponse(
            image_id=f"im-{abs(hash(request.image.SerializeToString(deterministic=True))):022d}"[:25],
            result=done,
            metadata=api_pb2.ImageMetadata(image_builder_version=BUILDER_VERSION),
        )

    async def do_MountBatchedCheckExistence(self, stream: Any, request: Any) -> Any:
        files = self._platform.directory / "files"
        missing = [one for one in request.sha256_hex_hashes if not (files / one).exists()]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def do_MountPutFile(self, stream: Any, request: Any) -> Any:
        file = self._platform.directory / "files" / request.sha256_hex
        if not file.exists() and (request.data or request.data_blob_id):
            held = self._platform.directory / "blobs" / request.data_blob_id
            file.write_bytes(request.data if request.data else held.read_bytes())
        elif not file.exists():
            file.write_bytes(b"")
        return api_pb2.MountPutFileResponse(exists=True)

    async def do_MountGetOrCreate(self, stream: Any, request: Any) -> Any:
        if request.deployment_name:
            mount = self._named("mount", request.deployment_name, "mo")
            self._platform.mounts.setdefault(mount, [])
        else:
            mount = self._platform.new_id("mo")
            self._platform.mounts[mount] = list(request.files)
        return api_pb2.MountGetOrCreateResponse(mount_id=mount)

    async def do_SecretGetOrCreate(self, stream: Any, request: Any) -> Any:
        secret = self._platform.new_id("st")
        self._platform.secrets[secret] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret)

    async def do_VolumeGetOrCreate(self, stream: Any, request: Any) -> Any:
        volume = self._named("volume", request.deployment_name, "vo")
        return api_pb2.VolumeGetOrCreateResponse(volume_id=volume, version=request.version)

    async def do_VolumeCommit(self, stream: Any, request: Any) -> Any:
        return api_pb2.VolumeCommitResponse()

    async def do_FunctionPrecreate(self, stream: Any, request: Any) -> Any:
        function = self._defined(request.existing_function_id, request.app_id)
        definition = function.definition
        definition.function_name, definition.function_type = request.function_name, request.function_type
        definition.function_schema.CopyFrom(request.function_schema)
        for name in ("supported_input_formats", "supported_output_formats"):
            definition.ClearField(name)
            getattr(definition, name).extend(getattr(request, name))
        for name, method in request.method_definitions.items():
            definition.method_definitions[name].CopyFrom(method)
        return api_pb2.FunctionPrecreateResponse(function_id=function.id, handle_metadata=function.metadata())

    async def do_FunctionCreate(self, stream: Any, request: Any) -> Any:
        function = self._defined(request.existing_function_id, request.app_id)
        function.definition.CopyFrom(request.function)
        data = api_pb2.FunctionData(
            module_name=request.function.module_name, function_name=request.function.function_name
        )
        data.ranked_functions.add(rank=0, function=request.function)
        return api_pb2.FunctionCreateResponse(
            function_id=function.id,
            function=request.function,
            function_data=data,
            handle_metadata=function.metadata(),
        )

    async def do_ClassCreate(self, stream: Any, request: Any) -> Any:
        class_id = request.existing_class_id or self._platform.new_id("cs")
        return api_pb2.ClassCreateResponse(class_id=class_id)

    # Look-ups

    async def do_FunctionGet(self, stream: Any, request: Any) -> Any:
        function_id = self._deployed(request.app_name).function_ids.get(request.object_tag)
        if function_id is None:
            raise GRPCError(
                Status.NOT_FOUND,
                f"Lookup failed: Function {request.object_tag!r} not found in App {request.app_name!r}",
            )
        function = self._platform.functions[function_id]
        data = api_pb2.FunctionData(
            module_name=function.definition.module_name, function_name=function.definition.function_name
        )
        data.ranked_functions.add(rank=0, function=function.definition)
        return api_pb2.FunctionGetResponse(function_id=function_id, handle_metadata=function.metadata(), function=data)

    async def do_ClassGet(self, stream: Any, request: Any) -> Any:
        app = self._deployed(request.app_name)
        class_id = app.class_ids.get(request.object_tag)
        if class_id is None:
            raise GRPCError(Status.NOT_FOUND, f"Lookup failed: Cls {request.object_tag!r} not found in App")
        return api_pb2.ClassGetResponse(
            class_id=class_id, handle_metadata=self._platform.class_metadata(app, request.object_tag)
        )

    async def do_FunctionBindParams(self, stream: Any, request: Any) -> Any:
        variant = self._platform.variant(self._platform.functions[request.function_id], request)
        return api_pb2.FunctionBindParamsResponse(bound_function_id=variant.id, handle_metadata=variant.metadata())

    # Calls

    async def do_FunctionMap(self, stream: Any, request: Any) -> Any:
        function = self._platform.functions.get(request.function_id)
        if function is None:
            raise GRPCError(Status.NOT_FOUND, "no such function")
        (item,) = request.pipelined_inputs
        put = self._platform.call(function, item, request.function_call_invocation_type)
        return api_pb2.FunctionMapResponse(
            function_call_id=put.call.id,
            function_call_jwt=f"jwt-{put.call.id}",
            pipelined_inputs=[api_pb2.FunctionPutInputsResponseItem(idx=0, input_id=put.id, input_jwt=f"jwt-{put.id}")],
            retry_policy=function.definition.retry_policy,
        )

    async def do_FunctionGetOutputs(self, stream: Any, request: Any) -> Any:
        call = self._call(request.function_call_id)
        deadline_s = time.monotonic() + min(request.timeout, LONG_POLL_S)
        while True:
            outputs = [put.output for put in call.inputs if put.output is not None and not put.lost]
            left_s = deadline_s - time.monotonic()
            if outputs or left_s <= 0:
                break
            call.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await call.changed.wait()
        unfinished = sum(put.output is None or put.lost for put in call.inputs)
        return api_pb2.FunctionGetOutputsResponse(
            outputs=outputs, idxs=[0] * len(outputs), last_entry_id="1-0", num_unfinished_inputs=unfinished
        )

    async def do_FunctionCallCancel(self, stream: Any, request: Any) -> Any:
        self._platform.cancel(self._call(request.function_call_id), terminate=request.terminate_containers)
        return Empty()

    async def do_FunctionCallFromId(self, stream: Any, request: Any) -> Any:
        call = self._call(request.function_call_id)
        return api_pb2.FunctionCallFromIdResponse(function_call_id=call.id, num_inputs=len(call.inputs))

    async def do_FunctionGetCallGraph(self, stream: Any, request: Any) -> Any:
        call = self._call(request.function_call_id)
        definition = call.function.definition
        return api_pb2.FunctionGetCallGraphResponse(
            inputs=[
                api_pb2.InputCallGraphInfo(
                    input_id=put.id,
                    status=put.output.result.status if put.output else 0,
                    function_call_id=call.id,
                    task_id=put.task,
                )
                for put in call.inputs
            ],
            function_calls=[
                api_pb2.FunctionCallCallGraphInfo(
                    function_call_id=call.id,
                    function_name=definition.function_name,
                    module_name=definition.module_name,
                )
            ],
        )

    async def do_FunctionCallList(self, stream: Any, request: Any) -> Any:
        since_s = time.time() - self._platform.chance.faults.unlisted_s
        calls = self._platform.calls.values()
        found = [call for call in calls if call.function.id == request.function_id and call.created_s <= since_s]
        return api_pb2.FunctionCallListResponse(function_calls=[_info(call) for call in found])

    # Containers as their owners see them

    async def do_TaskGetInfo(self, stream: Any, request: Any) -> Any:
        record = self._platform.records.get(request.task_id)
        if record is None:
            raise GRPCError(Status.NOT_FOUND, "no such task")
        info = api_pb2.TaskInfo(
            id=record.task,
            started_at=record.started_s,
            finished_at=record.finished_s,
            enqueued_at=record.enqueued_s,
            gpu_type=record.gpu,
        )
        return api_pb2.TaskGetInfoResponse(info=info)

    async def do_ContainerStop(self, stream: Any, request: Any) -> Any:
        container = self._platform.containers.get(request.task_id)
        if container is not None:
            self._platform.end(container, "stopped")
        return api_pb2.ContainerStopResponse()

    # Queues

    async def do_QueueGetOrCreate(self, stream: Any, request: Any) -> Any:
        queue = self._named("queue", request.deployment_name, "qu")
        self._platform.queues.setdefault(queue, {})
        return api_pb2.QueueGetOrCreateResponse(queue_id=queue)

    async def do_QueuePut(self, stream: Any, request: Any) -> Any:
        self._queue(request).extend(request.values)
        async with self._platform.news:
            self._platform.news.notify_all()
        return Empty()

    async def do_QueueGet(self, stream: Any, request: Any) -> Any:
        queue = self._queue(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout), self._platform.news:
                await self._platform.news.wait_for(lambda: bool(queue))
        values = [queue.popleft() for _ in range(min(len(queue), max(1, request.n_values)))]
        return api_pb2.QueueGetResponse(values=values)

    async def do_QueueDelete(self, stream: Any, request: Any) -> Any:
        self._platform.queues.pop(request.queue_id, None)
        self._platform.names = {k: v for k, v in self._platform.names.items() if v != request.queue_id}
        return Empty()

    # Blobs

    async def do_BlobCreate(self, stream: Any, request: Any) -> Any:
        blob = self._platform.new_id("bl")
        urls = api_pb2.UploadUrlList(items=[f"{self._blob_url}/blobs/{blob}"])
        return api_pb2.BlobCreateResponse(blob_ids=[blob], upload_urls=urls)

    async def do_BlobGet(self, stream: Any, request: Any) -> Any:
        return api_pb2.BlobGetResponse(download_url=f"{self._blob_url}/blobs/{request.blob_id}")

    # What containers ask

    async def do_ContainerHello(self, stream: Any, request: Any) -> Any:
        return Empty()

    async def do_ContainerHeartbeat(self, stream: Any, request: Any) -> Any:
        container = self.container(stream)
        told, container.cancelled = container.cancelled, []
        response = api_pb2.ContainerHeartbeatResponse()
        if told:
            response.cancel_input_event.input_ids.extend(told)
        return response

    async def do_FunctionGetInputs(self, stream: Any, request: Any) -> Any:
        container = self.container(stream)
        linger_s = request.batch_linger_ms / 1000
        taken = await self._platform.take(container, max(1, request.batch_max_size), linger_s)
        if not taken:
            return api_pb2.FunctionGetInputsResponse(inputs=[api_pb2.FunctionGetInputsItem(kill_switch=True)])
        return api_pb2.FunctionGetInputsResponse(inputs=[_item(put) for put in taken])

    async def do_FunctionPutOutputs(self, stream: Any, request: Any) -> Any:
        container = self.container(stream)
        for item in request.outputs:
            put = container.inputs.get(item.input_id)
            if put is not None:
                self._platform.put_output(put, item)
        if container.function.definition.single_use_containers:
            container.leaving.set()
        return Empty()

    async def do_TaskResult(self, stream: Any, request: Any) -> Any:
        """A container that could not begin. Modal tries again some times; here its function's inputs fail at once."""
        container = self.container(stream)
        container.leaving.set()
        function = container.function
        for put in [*container.inputs.values(), *function.queue]:
            result = api_pb2.GenericResult(
                status=api_pb2.GenericResult.GENERIC_STATUS_INIT_FAILURE, exception=request.result.exception
            )
            self._platform.put_output(put, api_pb2.FunctionPutOutputsItem(input_id=put.id, result=result))
        function.queue.clear()
        return Empty()

    # Names

    def _app(self, name: str) -> App | None:
        return next((app for app in self._platform.apps.values() if app.name == name and app.deployed_s), None)

    def _deployed(self, name: str) -> App:
        app = self._app(name)
        if app is None:
            raise GRPCError(Status.NOT_FOUND, f"App {name!r} not found in environment 'main'")
        return app

    def _defined(self, existing: str, app_id: str) -> Function:
        functions = self._platform.functions
        if existing in functions:
            return functions[existing]
        function = Function(self._platform.new_id("fu"), self._platform.apps[app_id], api_pb2.Function())
        functions[function.id] = function
        return function

    def _call(self, call_id: str) -> FunctionCall:
        call = self._platform.calls.get(call_id)
        if call is None:
            raise GRPCError(Status.NOT_FOUND, f"no call {call_id!r}")
        return call

    def _named(self, kind: str, name: str, prefix: str) -> str:
        if not name:
            return self._platform.new_id(prefix)
        return self._platform.names.setdefault((kind, name), self._platform.new_id(prefix))

    def _queue(self, request: Any) -> deque[bytes]:
        found = self._platform.queues.get(request.queue_id)
        if found is None:
            raise GRPCError(Status.NOT_FOUND, "no such queue")
        return found.setdefault(request.partition_key, deque())


def _item(put: Input) -> api_pb2.FunctionGetInputsItem:
    return api_pb2.FunctionGetInputsItem(
        input_id=put.id,
        input=put.content,
        function_call_id=put.call.id,
        function_call_invocation_type=put.invocation_type,  # type: ignore[arg-type]
        retry_count=put.restarts,
    )


def _info(call: FunctionCall) -> api_pb2.FunctionCallInfo:
    done = [put for put in call.inputs if put.output is not None]
    return api_pb2.FunctionCallInfo(
        function_call_id=call.id,
        created_at=call.created_s,
        scheduled_at=call.created_s,
        pending_inputs=api_pb2.InputCategoryInfo(total=len(call.inputs) - len(done)),
        total_inputs=len(call.inputs),
    )


def _method(name: str) -> Any:
    async def method(self: Any, stream: Any) -> None:
        request = await stream.recv_message()
        await stream.send_message(await Servicer.answer(self, name, stream, request))

    return method


ModalServicer: Any = patch_mock_servicer(
    type(
        "ModalServicer",
        (Servicer, ModalClientBase),
        {name[3:]: _method(name[3:]) for name in vars(Servicer) if name.startswith("do_")},
    )
)
