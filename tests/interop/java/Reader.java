import com.alibaba.fastjson2.JSONObject;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.common.RemotingHelper;

/** Reads topics from their first messages, and answers each one, until the number or the time is reached. */
@SuppressWarnings("deprecation")
public final class Reader {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            JSONObject request = lines.next();
            DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("interop-reader");
            consumer.setNamesrvAddr(request.getString("nameServer"));
            if (request.getString("namespace") != null) {
                consumer.setNamespace(request.getString("namespace"));
            }
            consumer.start();
            read(lines, request, consumer);
        });
    }

    private static void read(Lines lines, JSONObject request, DefaultMQPullConsumer consumer) throws Exception {
        List<String> topics = request.getList("topics", String.class);
        long deadline = System.currentTimeMillis() + request.getLongValue("withinMs");
        Map<MessageQueue, Long> offsets = new HashMap<>();
        int wanted = request.getIntValue("count");
        List<String> only = request.getList("only", String.class);
        int seen = 0;
        while (seen < wanted && System.currentTimeMillis() < deadline) {
            boolean found = false;
            for (MessageQueue queue : queues(consumer, topics)) {
                long offset = offsets.containsKey(queue) ? offsets.get(queue) : consumer.minOffset(queue);
                // The smallest offset of a BatchCQ queue without messages is -1, and its next offset, too.
                PullResult result = consumer.pull(queue, request.getString("tags"), Math.max(0, offset), 1000);
                offsets.put(queue, result.getNextBeginOffset());
                if (result.getPullStatus() == PullStatus.FOUND) {
                    found = true;
                    for (MessageExt message : result.getMsgFoundList()) {
                        Map<String, Object> answer = describe(message);
                        if (!only.isEmpty()) {
                            answer.keySet().retainAll(only);
                        }
                        lines.answer(answer);
                        seen++;
                    }
                }
            }
            if (!found) {
                Thread.sleep(100);
            }
        }
    }

    private static Set<MessageQueue> queues(DefaultMQPullConsumer consumer, List<String> topics) {
        Set<MessageQueue> found = new HashSet<>();
        for (String topic : topics) {
            try {
                found.addAll(consumer.fetchSubscribeMessageQueues(topic));
            } catch (MQClientException unknown) {
                // The name server does not know the topic yet, so it has no queues.
            }
        }
        return found;
    }

    private static Map<String, Object> describe(MessageExt message) {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("topic", message.getTopic());
        found.put("body", Lines.base64(message.getBody()));
        found.put("properties", message.getProperties());
        found.put("flag", message.getFlag());
        found.put("sysFlag", message.getSysFlag());
        found.put("brokerName", message.getBrokerName());
        found.put("queueId", message.getQueueId());
        found.put("queueOffset", message.getQueueOffset());
        found.put("commitLogOffset", message.getCommitLogOffset());
        found.put("msgId", message.getMsgId());
        found.put("offsetMsgId", ((MessageClientExt) message).getOffsetMsgId());
        found.put("bornTimestamp", message.getBornTimestamp());
        found.put("bornHost", RemotingHelper.parseSocketAddressAddr(message.getBornHost()));
        found.put("storeTimestamp", message.getStoreTimestamp());
        found.put("storeHost", RemotingHelper.parseSocketAddressAddr(message.getStoreHost()));
        found.put("reconsumeTimes", message.getReconsumeTimes());
        return found;
    }
}
