"""``python -m rocketmq_spark``: the ``rocketmq-spark`` command."""

import sys

from rocketmq_spark.cli.app import main

sys.exit(main())
