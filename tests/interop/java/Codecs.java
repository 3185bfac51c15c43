import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.Validators;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.Compressor;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageBatch;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.utils.NameServerAddressUtils;
import org.apache.rocketmq.remoting.protocol.NamespaceUtil;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;

/** Calls the classes of RocketMQ that need no server. Each request names a function. */
public final class Codecs {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            for (JSONObject request = lines.next(); request != null; request = lines.next()) {
                lines.answer(answer(request));
            }
        });
    }

    private static Map<String, Object> answer(JSONObject request) throws Exception {
        Map<String, Object> answer = new LinkedHashMap<>();
        switch (request.getString("do")) {
            case "hash":
                answer.put("hash", request.getString("key").hashCode());
                answer.put("indexes", indexes(request));
                break;
            case "hashOfBytes":
                answer.put("hash", new String(Lines.bytes(request, "body"), StandardCharsets.UTF_8).hashCode());
                break;
            case "hashOfLong":
                answer.put("hash", request.getLong("key").hashCode());
                break;
            case "publish":
                answer.put("queues", publish(request.getString("route")));
                break;
            case "encodeProperties":
                answer.put("text", MessageDecoder.messageProperties2String(texts(request.getJSONObject("properties"))));
                break;
            case "decodeProperties":
                answer.put("properties", MessageDecoder.string2messageProperties(request.getString("text")));
                break;
            case "compress":
                answer.put("body", Lines.base64(
                    compressor(request).compress(Lines.bytes(request, "body"), request.getIntValue("level"))));
                break;
            case "decompress":
                answer.put("body", Lines.base64(compressor(request).decompress(Lines.bytes(request, "body"))));
                break;
            case "decodeBatch":
                answer.put("messages", decodeBatch(Lines.bytes(request, "body")));
                break;
            case "encodeBatch":
                answer.putAll(encodeBatch(request.getJSONArray("messages")));
                break;
            case "namespace":
                answer.put("wrapped", NamespaceUtil.wrapNamespace(
                    request.getString("namespace"), request.getString("resource")));
                answer.put("unwrapped", NamespaceUtil.withoutNamespace(
                    request.getString("resource"), request.getString("namespace")));
                break;
            case "namespaceOf":
                String address = request.getString("address");
                answer.put("namespace", NameServerAddressUtils.validateInstanceEndpoint(address)
                    ? NameServerAddressUtils.parseInstanceIdFromEndpoint(address) : null);
                break;
            case "id":
                String id = request.getString("id");
                answer.put("ip", MessageClientIDSetter.getIPStrFromID(id));
                answer.put("pid", MessageClientIDSetter.getPidFromID(id));
                answer.put("time", MessageClientIDSetter.getNearlyTimeFromID(id).getTime());
                break;
            case "reserved":
                answer.put("names", new ArrayList<>(MessageConst.STRING_HASH_SET));
                break;
            case "validate":
                answer.put("blank", UtilAll.isBlank(request.getString("name")));
                answer.put("topic", codeOf(() -> {
                    Message message = new Message(request.getString("name"), new byte[] {1});
                    Validators.checkMessage(message, new DefaultMQProducer("group"));
                }));
                answer.put("group", codeOf(() -> Validators.checkGroup(request.getString("name"))));
                break;
            default:
                throw new IllegalArgumentException(request.getString("do"));
        }
        return answer;
    }

    private static List<List<Object>> publish(String route) {
        TopicRouteData data = TopicRouteData.decode(route.getBytes(StandardCharsets.UTF_8), TopicRouteData.class);
        List<List<Object>> queues = new ArrayList<>();
        for (MessageQueue queue : MQClientInstance.topicRouteData2TopicPublishInfo("T", data).getMessageQueueList()) {
            queues.add(List.of(queue.getBrokerName(), queue.getQueueId()));
        }
        return queues;
    }

    private static List<Integer> indexes(JSONObject request) {
        List<Integer> found = new ArrayList<>();
        for (Object count : request.getJSONArray("counts")) {
            List<MessageQueue> queues = new ArrayList<>();
            for (int index = 0; index < (Integer) count; index++) {
                queues.add(new MessageQueue("topic", "broker", index));
            }
            found.add(new SelectMessageQueueByHash().select(queues, null, request.getString("key")).getQueueId());
        }
        return found;
    }

    private static Map<String, String> texts(JSONObject object) {
        Map<String, String> texts = new HashMap<>();
        object.forEach((name, value) -> texts.put(name, (String) value));
        return texts;
    }

    private static Compressor compressor(JSONObject request) {
        return CompressorFactory.getCompressor(CompressionType.of(request.getString("type")));
    }

    private static List<Object> decodeBatch(byte[] body) throws Exception {
        List<Object> messages = new ArrayList<>();
        for (Message message : MessageDecoder.decodeMessages(ByteBuffer.wrap(body))) {
            Map<String, Object> found = new LinkedHashMap<>();
            found.put("body", Lines.base64(message.getBody()));
            found.put("flag", message.getFlag());
            found.put("properties", message.getProperties());
            messages.add(found);
        }
        return messages;
    }

    private static Map<String, Object> encodeBatch(JSONArray messages) {
        List<Message> members = new ArrayList<>();
        for (int at = 0; at < messages.size(); at++) {
            JSONObject given = messages.getJSONObject(at);
            Message member = new Message(given.getString("topic"), Lines.bytes(given, "body"));
            member.setFlag(given.getIntValue("flag"));
            MessageAccessor.setProperties(member, texts(given.getJSONObject("properties")));
            members.add(member);
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        try {
            MessageBatch batch = MessageBatch.generateFromList(members);
            answer.put("body", Lines.base64(batch.encode()));
            answer.put("refused", null);
        } catch (RuntimeException refused) {
            answer.put("body", null);
            answer.put("refused", String.valueOf(refused));
        }
        return answer;
    }

    private interface Check {
        void run() throws MQClientException;
    }

    /** Returns the response code of a check's error, null without an error. */
    private static Integer codeOf(Check check) {
        try {
            check.run();
            return null;
        } catch (MQClientException refused) {
            return refused.getResponseCode();
        }
    }
}
