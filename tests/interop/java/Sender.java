import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageExt;

/** Sends the messages of each request, and answers its SendResult. The first request configures the producer. */
public final class Sender {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            DefaultMQProducer producer = producer(lines.next());
            producer.start();
            for (JSONObject request = lines.next(); request != null; request = lines.next()) {
                List<Message> messages = messages(request.getJSONArray("messages"));
                Map<String, Object> answer = describe(send(producer, request, messages));
                // The result of a batch that a broker stores as one unit has one id only.
                answer.put("uniqKeys", messages.stream().map(MessageClientIDSetter::getUniqID).toArray());
                lines.answer(answer);
            }
        });
    }

    private static DefaultMQProducer producer(JSONObject config) {
        TransactionMQProducer producer = new TransactionMQProducer("interop-sender");
        producer.setNamesrvAddr(config.getString("nameServer"));
        // A new JVM on a busy machine is slow. The look-up of the route has its own timeout, the last one here.
        producer.setSendMsgTimeout(30_000);
        // A producer can miss that a connection was closed. Then another attempt has the rest of the time.
        producer.setSendMsgMaxTimeoutPerRequest(15_000);
        producer.setMqClientApiTimeout(30_000);
        if (config.getString("namespace") != null) {
            producer.setNamespace(config.getString("namespace"));
        }
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                return (LocalTransactionState) state;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        return producer;
    }

    private static List<Message> messages(JSONArray given) {
        List<Message> messages = new ArrayList<>();
        for (int at = 0; at < given.size(); at++) {
            messages.add(message(given.getJSONObject(at)));
        }
        return messages;
    }

    private static SendResult send(DefaultMQProducer producer, JSONObject request, List<Message> messages)
            throws Exception {
        if (request.getString("compressType") != null) {
            producer.setCompressType(CompressionType.of(request.getString("compressType")));
        }
        if (request.getBooleanValue("batch")) {
            return producer.send(messages);
        }
        if (request.getString("hashKey") != null) {
            return producer.send(messages.get(0), new SelectMessageQueueByHash(), request.getString("hashKey"));
        }
        if (request.getString("transaction") != null) {
            return producer.sendMessageInTransaction(
                messages.get(0), LocalTransactionState.valueOf(request.getString("transaction")));
        }
        return producer.send(messages.get(0));
    }

    private static Message message(JSONObject given) {
        Message message = new Message(given.getString("topic"), Lines.bytes(given, "body"));
        message.setFlag(given.getIntValue("flag"));
        JSONObject properties = given.getJSONObject("properties");
        if (properties != null) {
            properties.forEach((name, value) -> MessageAccessor.putProperty(message, name, (String) value));
        }
        if (given.getLong("deliverInMs") != null) {
            message.setDeliverTimeMs(System.currentTimeMillis() + given.getLongValue("deliverInMs"));
        }
        return message;
    }

    private static Map<String, Object> describe(SendResult result) {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("status", result.getSendStatus().name());
        found.put("msgId", result.getMsgId());
        found.put("offsetMsgId", result.getOffsetMsgId());
        found.put("topic", result.getMessageQueue().getTopic());
        found.put("brokerName", result.getMessageQueue().getBrokerName());
        found.put("queueId", result.getMessageQueue().getQueueId());
        found.put("queueOffset", result.getQueueOffset());
        found.put("transactionId", result.getTransactionId());
        found.put("regionId", result.getRegionId());
        found.put("traceOn", result.isTraceOn());
        return found;
    }
}
