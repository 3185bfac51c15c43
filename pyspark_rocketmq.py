"""Lets Spark find ``format("rocketmq")`` by itself: it imports every top-level module named ``pyspark_*``.

PySpark 4.0 is left out: there a source found this way could never be replaced by `rocketmq_spark.register`, which
brings the metrics (SPARK-51919 came with 4.1). An exception here would break the lookup of every other source, and
the import happens once per JVM: it must stay cheap.
"""

from pyspark import __version__ as _pyspark_version

if tuple(map(int, _pyspark_version.split(".")[:2])) >= (4, 1):
    from rocketmq_spark.spark.datasource import RocketMQDataSource

    class DefaultSource(RocketMQDataSource):
        """The source that the automatic lookup takes."""
