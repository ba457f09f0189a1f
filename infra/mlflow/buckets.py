"""Creates buckets that do not exist: `python buckets.py NAME...`, endpoint and keys from AWS_*."""

import sys

import boto3
from botocore.exceptions import ClientError

client = boto3.client("s3")
for name in sys.argv[1:]:
    try:
        client.head_bucket(Bucket=name)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise  # wrong keys: creating it would not help
        client.create_bucket(Bucket=name)
