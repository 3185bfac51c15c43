"""``python -m rocketmq_spark`` runs the ``rocketmq-spark`` command."""

import sys

from rocketmq_spark.cli.app import main

sys.exit(main())
